"""Damaged files of every format: each is used as a user would, in a process of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from campaign import hostile, sound
from campaign.apart import Ended, apart, must
from campaign.mutate import BYTES, PLACES
from campaign.outcomes import Row
from campaign.targets import Attack, Target, all_targets, enter, noted


class Field:
    """The sound files, the hostile ones, and the folder of the case at hand, all in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.case, self.sound, self.hostile = (folder / name for name in ("case", "sound", "hostile"))
        # Made where cases will be: what is kept of a tar file goes by its whole path.
        self.case.mkdir()
        must(apart(lambda: sound.make(self.case), 120, None))
        shutil.copytree(self.case, self.sound)
        must(apart(lambda: hostile.make(self.sound, self.hostile), 120, None))
        self.targets = all_targets(self.sound)
        self.expected: dict[int, Any] = {}
        for target in self.targets:
            for use in target.uses:
                self.renew(target.files[0])
                self.expected[id(use)] = must(self.used(use)).value

    def renew(self, file: str = "") -> None:
        """A fresh folder, in which `file` may be changed, and the run it belongs to. The others are links."""
        shutil.rmtree(self.case)
        self.case.mkdir()
        for path in self.sound.iterdir():
            mine = file.split("/")[0] == path.name
            if path.is_dir() and (mine or not path.name.startswith("unfinished")):
                shutil.copytree(path, self.case / path.name, copy_function=shutil.copy2 if mine else os.link)
            elif path.is_file():
                shutil.copy2(path, self.case / path.name)

    def used(self, use: Any) -> Ended:
        def work() -> Any:
            enter(self.case)
            return use()

        return apart(work)

    def attack(self, target: Target, rng: Random) -> Attack:
        """Damage one file of the target, in a fresh folder."""
        file, use = rng.choice(target.files), rng.choice(target.uses)
        self.renew(file)
        path = self.case / file
        data = path.read_bytes()
        ways = [BYTES] * 6 + [target.inside] * 3 * bool(target.inside) + [PLACES]
        ready = sorted((self.hostile / target.hostile).iterdir()) if target.hostile else []
        if ready and rng.random() < 0.3:
            chosen = rng.choice(ready)
            file = target.files[0] if len(target.files) < 3 or target.format == "checkpoint" else file
            path = self.case / file
            data = path.read_bytes()
            path.write_bytes(chosen.read_bytes())
            return Attack(target, file, chosen.name, use, True, data)
        how, change = rng.choice(sorted(rng.choice(ways).items()))
        if how in PLACES:
            change(path)
        else:
            path.write_bytes(change(data, rng))
        return Attack(target, file, how, use, False, data)

    def outcome(self, attack: Attack) -> tuple[str, str]:
        """What became of an attack, and what was said."""
        ended = self.used(attack.use)
        return classify(ended, attack, self.expected[id(attack.use)], self.case), ended.error or ended.text


def classify(ended: Ended, attack: Attack, expected: Any, case: Path) -> str:
    """The outcome, of `OUTCOMES`."""
    path = case / attack.file
    names = {path.name}
    if path.parent != case:  # of files that belong together and do not fit, either may be named
        names |= {other.name for other in path.parent.iterdir() if other.suffix in (".json", ".safetensors", ".pt")}
    if ended.kind in ("hang", "memory", "crash"):
        return ended.kind
    if ended.kind == "done":
        if ended.value == expected:
            return "right"
        here = Path.cwd()
        enter(case)
        try:
            return "right" if attack.target.judge(attack, ended.value, expected, ended.text) else "silent"
        finally:
            enter(here)
    if ended.kind == "raised":  # by a function of Python's, since a command would have exited
        foreseen = not ended.text and ended.error
        return "traceback" if not foreseen else "refused" if is_clear(ended.error, names) else "unclear"
    if ended.code == 0 or "Traceback" in ended.text:
        return "traceback"
    said = [line for line in ended.text.splitlines() if not line.startswith(("note:", "skipped "))]
    if attack.target.judge is noted and noted(
        attack, None, None, ended.text
    ):  # nothing could tell which file was to blame
        names.add("")
    return "refused" if len(said) == 1 and is_clear(said[0], names) else "unclear"


def is_clear(sentence: str, names: set[str]) -> bool:
    named = any(name in sentence for name in names)
    return "\n" not in sentence and named and "weights_only" not in sentence


def attack_files(cases: int, seed: int, folder: Path) -> Iterator[Row]:
    """A row for every format, after `cases` attacks on all of them together, in turn."""
    field = Field(folder)
    rows = {target.format: Row("files", target.format) for target in field.targets}
    for number in range(cases):
        target = field.targets[number % len(field.targets)]
        attack = field.attack(target, Random(f"{seed} {number}"))
        outcome, said = field.outcome(attack)
        told = " | ".join(said.strip()[-300:].splitlines())
        rows[target.format].add(outcome, f"case {number}, {attack.file}: {attack.how}: {told}")
    yield from rows.values()
