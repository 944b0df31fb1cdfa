"""The program: `ckptconv`, or `python -m ckptconv`."""

import atexit
import gc
import sys

_INTERRUPTED = (
    '{"schema": 1, "error": {"kind": "Interrupted", "message": "interrupted", "path": null, '
    '"where": null,'
    ' "what": "interrupted", "hint": null, "exit_code": 130}}'
)
"""What `terminal` would print, if it were there already."""


def main() -> None:
    """Import the command line, which takes a moment in which Ctrl-C is not an error, and run it."""
    try:
        # one command and the process ends: neither modules nor a tree of a million nodes are
        # garbage, and looking costs a tenth
        gc.disable()
        atexit.register(gc.freeze)  # else Python looks once more as it ends
        from ckptconv.cli.main import main as command_line
        from ckptconv.support.platforms import tame_blas

        tame_blas()
        command_line()  # tells of its own stops, once it hears of them
    except (KeyboardInterrupt, RuntimeError) as error:
        # until 3.11, Python makes a RuntimeError of one that comes while a class is made
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        if "--json" in sys.argv:
            print(_INTERRUPTED)
        sys.exit(130)


if __name__ == "__main__":
    main()
