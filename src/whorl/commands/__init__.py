"""The commands of `whorl`: argument parsing and printing, no logic.

A command is a module with `add(commands)`, which declares its arguments, and `run(arguments)`, which gives the exit
status.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

from whorl import __version__
from whorl.commands import bench, doctor, generate, train, tune, warm
from whorl.commands.generate import printable
from whorl.errors import InputError, UnsupportedError

BAD_INPUT, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help lists what it takes)\n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command line (None: this process's own); a wrong one ends the process with status 2."""
    parser = Parser(prog="whorl", description="Recurrent layers at the speed of the hardware.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"whorl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (train, generate, bench, warm, tune, doctor):
        command.add(commands)
    arguments, surplus = parser.parse_known_args(words)
    if surplus:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(surplus)}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of the command line `words` (None: this process's own).

    It is 0, 1 where `doctor` finds something broken that whorl needs or `bench` finds numbers of whorl's wrong, 2 for
    bad input, 130 after Ctrl-C.
    """
    arguments = parse(words)
    try:
        return arguments.run(arguments)
    except (InputError, UnsupportedError) as error:
        message = " ".join(str(error).split())
    except (MemoryError, torch.OutOfMemoryError) as error:
        message = f"out of memory: {' '.join(str(error).split()) or 'make the model, --batch or --time smaller'}"
    except KeyboardInterrupt:
        print(f"whorl {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(f"whorl {arguments.command}: {printable(message)}", file=sys.stderr)
    return BAD_INPUT
