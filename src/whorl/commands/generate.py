"""`whorl generate`: let a trained model write."""

import argparse
import os
import sys
from pathlib import Path

import torch

from whorl.settings import settings
from whorl.text import devices
from whorl.text.checkpoint import load
from whorl.text.folder import newest
from whorl.text.sampling import encoded, sample

TAB, NEWLINE, UNPRINTABLE = "\t", "\n", "\ufffd"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Write text with a model that `whorl train` trained."
    parser = commands.add_parser("generate", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder, or a checkpoint in one")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with (the start of a line)")
    parser.add_argument("--length", type=int, default=600, help="tokens to write (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="1: as the model learned; less: likelier; 0: likeliest (0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (from all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it."""
    device = devices.find(arguments.device)
    checkpoint = load(newest(arguments.run_folder), training=False)
    vocabulary, given = checkpoint.vocabulary, arguments.prompt
    prompt = vocabulary.start if given is None else encoded(vocabulary, os.fsencode(given))
    with settings(slow="allow" if settings.slow == "warn" else settings.slow):  # a step at a time is no long loop
        written = sample(
            checkpoint.model().to(device),
            prompt,
            arguments.length,
            arguments.temperature,
            arguments.seed,
            arguments.top_k,
        )
    text = vocabulary.decode(written if given is None else torch.cat([prompt.long(), written]))
    print(printable(text) if sys.stdout.isatty() else text)
    return 0


def printable(text: str) -> str:
    """A text that cannot command a terminal: what is no character to see becomes U+FFFD."""
    return "".join(c if c.isprintable() or c in (TAB, NEWLINE) else UNPRINTABLE for c in text)
