"""The program: `ckptconv`, or `python -m ckptconv`."""

import sys


def main() -> None:
    """Import the command line, which takes a moment in which Ctrl-C is no error either, and run it."""
    try:
        from ckptconv.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
