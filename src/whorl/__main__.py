"""`python -m whorl` and the command `whorl`."""

import io
import sys

from whorl.commands import main as run


def main() -> None:
    """Carry out the command line and exit with its status; what a stream's encoding cannot say is printed as `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run())


if __name__ == "__main__":
    main()
