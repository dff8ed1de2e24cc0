"""Attack topovq and count what comes of it: `make campaign`.

The table goes to --out. What did not end as it should is printed, case by case, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch, since processes are forked, and threads do not survive that
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before pyarrow, whose own pools take addresses by the gigabyte, and memory is limited here
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

from campaign.explorer import attack_explorer
from campaign.files import attack_files
from campaign.kills import attack_commands
from campaign.outcomes import Row, write_table
from campaign.ranks import attack_ranks

# Of 10,000 cases: 10,000 files, 150 kills (50 of each command), 5,000 requests, 20 worlds of 2 and of 4 ranks
PARTS: dict[str, Callable[[int, int, Path], Iterator[Row]]] = {
    "files": attack_files,
    "kills": lambda cases, seed, folder: attack_commands(max(1, cases // 200), seed, folder),
    "ranks": lambda cases, seed, folder: attack_ranks(max(1, cases // 1000), seed, folder),
    "requests": lambda cases, seed, folder: attack_explorer(cases // 2, seed, folder),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="damaged files; the other parts go with it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(PARTS), help="one part alone")
    parser.add_argument("--out", type=Path, help="write the table to this CSV file")
    arguments = parser.parse_args()
    rows = []
    for part in [arguments.only] if arguments.only else PARTS:
        rows += run(part, arguments.cases, arguments.seed)
        if arguments.out:
            write_table(rows, arguments.out, arguments.seed)
    faults = [fault for row in rows for fault in row.faults]
    print("\n".join(faults))
    sys.exit(bool(faults))


def run(part: str, cases: int, seed: int) -> list[Row]:
    """The rows of one part, in a folder in memory where there is one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="campaign-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        rows = list(PARTS[part](cases, seed, Path(folder)))
    for row in rows:
        counted = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(row.counts.items()))
        measured = "".join(f", {name} {value:,.1f}" for name, value in row.figures.items())
        print(f"{row.part:10}{row.format:20}{counted}{measured}")
    print(f"{part}: {time.monotonic() - began:,.0f} s", file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()
