"""Make .venv with torch, whorl (editable) and its development tools: `make` runs this, with any Python 3.

Which torch is the one thing that pip cannot decide: on Linux plain `torch` brings gigabytes of CUDA, so a machine
without an NVIDIA GPU gets the CPU build, `torch==VERSION+cpu`; everywhere else plain `torch==VERSION` is right. A torch
of the pinned version that is already in .venv stays, whatever its build: to choose another, install it there first.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSTRAINTS = os.path.join(ROOT, "tools", "constraints.txt")
ENVIRONMENT = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(ENVIRONMENT, "Scripts" if os.name == "nt" else "bin", "python")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main():
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        found = f"{sys.executable} is {platform.python_version()}"
        sys.exit(f"whorl needs Python 3.10 to 3.13, {found}: name another, as in `make test PYTHON=python3.12`")
    if not os.path.exists(PYTHON):
        if importlib.util.find_spec("ensurepip") is None:
            remedy = "install its venv package (Debian, Ubuntu: apt install python3-venv)"
            sys.exit(f"{sys.executable} cannot make virtual environments: {remedy}")
        say(f"making .venv with Python {platform.python_version()}")
        subprocess.check_call([sys.executable, "-m", "venv", ENVIRONMENT])
    install_torch(pinned_torch())
    say("installing whorl and its development tools")
    if not pip("--quiet", "--constraint", CONSTRAINTS, "--editable", ROOT + "[dev]"):
        sys.exit("pip could not install whorl: its message is above")


def install_torch(version):
    if installed_torch().split("+")[0] == version:
        return
    wanted = f"torch=={version}"
    if platform.system() != "Linux" or has_nvidia_gpu():
        say(f"installing {wanted}")
        if not pip(wanted):
            sys.exit(f"pip could not install {wanted}: its message is above")
        return
    say(f"installing {wanted}+cpu: there is no NVIDIA GPU here")
    if pip("--no-deps", f"{wanted}+cpu", silent=True):
        return
    say(f"it is not among pip's own sources, asking {CPU_INDEX}")
    if not pip("--no-deps", "--index-url", CPU_INDEX, f"{wanted}+cpu"):
        sys.exit(
            f"no CPU build of torch {version} for Python {platform.python_version()} on {platform.machine()} came from "
            f"there either: pip's message is above. Another build: {PYTHON} -m pip install {wanted}, then make again"
        )


def pinned_torch():
    with open(CONSTRAINTS, encoding="utf-8") as lines:
        return next(line.split("==")[1].strip() for line in lines if line.startswith("torch=="))


def installed_torch():
    code = "from importlib.metadata import distributions; print(*(d.version for d in distributions(name='torch')))"
    return subprocess.check_output([PYTHON, "-c", code], universal_newlines=True).strip()


def has_nvidia_gpu():
    program = shutil.which("nvidia-smi")
    return program is not None and run([program, "-L"], silent=True)


def pip(*arguments, silent=False):
    return run([PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *arguments], silent)


def run(command, silent=False):
    output = subprocess.DEVNULL if silent else None
    return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) == 0


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    main()
