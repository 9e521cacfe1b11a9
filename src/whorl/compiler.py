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
    """The command of the compiler: $CXX, else the first of `COMPILERS` on the PATH, else pip's; "" where none is."""
    for words in [shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)]:
        if words and shutil.which(words[0]):
            return shlex.join(words)
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


def is_microsofts(command: str) -> bool:
    """Whether it is `cl`, which takes other arguments than the rest and another C++."""
    return bool(command) and Path(shlex.split(command)[0]).stem == "cl"


def remedy(platform: str = sys.platform) -> str:
    """How to get one, as a command to type."""
    system = _REMEDIES.get(platform, "type `sudo apt install g++` (Fedora: `sudo dnf install gcc-c++`)")
    return f"{system}, or `pip install {_ZIG}`"
