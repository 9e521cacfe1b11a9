"""`whorl doctor`: what of this machine whorl can use, one line each: ok, or what to do."""

import argparse

from rich.console import Console
from rich.text import Text

from whorl.diagnosis import diagnose, probe


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Look at the GPU, the driver, the compilers, the caches and the versions: one line each, ok or what to do."
    commands.add_parser("doctor", help=text, description=text, allow_abbrev=False).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 where something is broken that whorl cannot work without."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    findings = diagnose(probe())
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = Text("ok ", "green") if finding.ok else Text("fix", "bold red" if finding.required else "yellow")
        remedy = "" if finding.ok else f": {finding.remedy}"
        console.print(Text.assemble(mark, f"  {finding.name:{width}}  {finding.detail}{remedy}"))
    return int(any(finding.required and not finding.ok for finding in findings))
