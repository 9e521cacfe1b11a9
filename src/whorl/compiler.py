"""The host's C++ compiler: which it is, what it says of itself, how to get one."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++", "cl")
_ZIG = "ziglang"  # a clang that pip installs
_REMEDIES = {
    "darwin": "type `xcode-select --install`",
    "win32": "type `winget install Microsoft.VisualStudio.2022.BuildTools`, choose C++, use the Native Tools prompt",
}


def found() -> str:
    """The command of the compiler: $CXX, there or not, else the first of `COMPILERS`, else pip's; "" where none is."""
    if named := os.environ.get("CXX", "").strip():
        return shlex.join(_words(named))
    for name in COMPILERS:
        if shutil.which(name):
            return name
    return shlex.join([sys.executable, "-m", _ZIG, "c++"]) if importlib.util.find_spec(_ZIG) else ""


def version(command: str) -> str:
    """What it says about its version, whole; "" where it does not start."""
    words = shlex.split(command)
    asked = words if is_microsofts(command) else [*words, "--version"]
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else ""


def _words(named: str) -> list[str]:
    """The program and its arguments, of $CXX: a path may have blanks, and on Windows backslashes."""
    if shutil.which(named):
        return [named]
    try:
        return shlex.split(named, posix=os.name != "nt")
    except ValueError:  # a quote that is not closed: no program has such a name, and it will be said
        return [named]


def is_microsofts(command: str) -> bool:
    """Whether it is `cl`, which takes other arguments than the rest and another C++."""
    return bool(command) and Path(shlex.split(command)[0]).stem == "cl"


def remedy(platform: str = sys.platform) -> str:
    """How to get one, as a command to type."""
    if os.environ.get("CXX", "").strip():
        return "name another in CXX, or unset it"
    system = _REMEDIES.get(platform, "type `sudo apt install g++` (Fedora: `sudo dnf install gcc-c++`)")
    return f"{system}, or `pip install {_ZIG}`"
