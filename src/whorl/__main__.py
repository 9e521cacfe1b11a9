"""`python -m whorl` and the command `whorl`."""

import io
import os
import sys

from whorl.commands import BAD_INPUT
from whorl.commands import main as run
from whorl.text.group import is_called


def main() -> None:
    """Carry out the command line and exit with its status.

    What a stream's encoding cannot say is printed as `?`. An output that takes no more, such as a full disk, is bad
    input; one whose reader has gone, as that of `| head`, is no error. A process of torchrun ends without Python's own
    end: there a thread of gloo that lets go of its last tensor aborts (https://github.com/pytorch/pytorch/issues/190489).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = _status()
    except OSError as error:  # commands translate those of files; what is left is the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where what is still unwritten goes
        status = 0
        if not isinstance(error, BrokenPipeError):
            print(f"whorl: cannot write the output: {error.strerror}", file=sys.stderr)
            status = BAD_INPUT
    if is_called():
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _status() -> int:
    try:
        status = run()
    except SystemExit as end:  # of argparse
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    main()
