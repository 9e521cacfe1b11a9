"""The commands of `whorl`: argument parsing and printing, no logic.

A command is a module with `add(commands)`, which declares its arguments, and `run(arguments)`, which gives the exit
status.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from whorl import __version__
from whorl.commands import bench, doctor, train
from whorl.commands.train import INTERRUPTED
from whorl.errors import InputError

BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help lists what it takes)\n")


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of the command line `words` (None: this process's own).

    It is 0, 1 where `doctor` finds something broken that whorl needs or `bench` finds numbers of whorl's wrong, 2 for
    bad input, 130 after Ctrl-C.
    """
    parser = Parser(prog="whorl", description="Recurrent layers at the speed of the hardware.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"whorl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (train, bench, doctor):
        command.add(commands)
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except InputError as error:
        print(f"whorl {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"whorl {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
