"""`python -m topovq` is the `topovq` command."""

from topovq.cli import main

if __name__ == "__main__":
    main()
