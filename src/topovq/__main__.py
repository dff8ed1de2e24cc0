"""The `topovq` command, also `python -m topovq`."""

import sys

from topovq.missing import MissingExtra, needs


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        with needs("train"):
            from topovq.cli import main as run
    except MissingExtra as error:
        print(f"topovq: the command needs more packages than the layers: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
