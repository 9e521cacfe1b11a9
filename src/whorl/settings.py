"""Every default and environment variable of whorl, each read when it is used; an empty one counts as none.

`settings.slow = "error"` holds for the process; `with settings(slow="error"):` for the block, in this thread or task.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from whorl.errors import InputError, SettingError


def _one_of(*allowed: str) -> Callable[[Any, str], str]:
    def check(value: Any, name: str) -> str:
        if value not in allowed:
            raise InputError(f"{name} is {value!r}: write one of {', '.join(map(repr, allowed))}.")
        return value

    return check


def _folder(value: Any, name: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InputError(f"{name} is {value!r}: write the path of a folder.")
    return Path(value).expanduser()


class _Setting(NamedTuple):
    variable: str
    default: Any
    check: Callable[[Any, str], Any]
    meaning: str


_SETTINGS = {
    "slow": _Setting(
        "WHORL_SLOW",
        "warn",
        _one_of("warn", "error", "allow"),
        "what happens where a layer can only run as a loop over time in Python",
    ),
    "calls": _Setting(
        "WHORL_CALLS",
        "compiled",
        _one_of("compiled", "python"),
        "whether calls of kernels go by C++, compiled once where there is a compiler, or through Python",
    ),
    "cache": _Setting("WHORL_CACHE", "~/.cache/whorl", _folder, "the private folder of compiled kernels"),
}


class Settings:
    """The settings of the process: attributes to read and assign, and a context manager when called."""

    __slots__ = ("_assigned", "_within")

    def __init__(self) -> None:
        object.__setattr__(self, "_assigned", {})
        object.__setattr__(self, "_within", ContextVar("whorl settings", default=None))

    def __getattr__(self, name: str) -> Any:
        return self._value(name, self._within.get() or {}, self._assigned)

    def _value(self, name: str, *places: dict[str, Any]) -> Any:
        setting = _known(name)
        for values in places:
            if name in values:
                return values[name]
        return setting.check(os.environ.get(setting.variable) or setting.default, setting.variable)

    def __setattr__(self, name: str, value: Any) -> None:
        self._assigned[name] = _known(name).check(value, f"settings.{name}")

    def __delattr__(self, name: str) -> None:
        """Take an assignment back: the environment's value holds again, or the default."""
        _known(name)
        self._assigned.pop(name, None)

    @contextmanager
    def __call__(self, **values: Any) -> Iterator[None]:
        """Hold `values` inside a `with` block.

        Raises:
            SettingError: an unknown name.
            InputError: a value that the setting does not take.
        """
        checked = {name: _known(name).check(value, f"settings.{name}") for name, value in values.items()}
        token = self._within.set({**(self._within.get() or {}), **checked})
        try:
            yield
        finally:
            self._within.reset(token)

    def of_block(self, name: str) -> Any:
        """What a `with` block holds here, which another thread does not see; None where none does."""
        within = self._within.get()
        return None if within is None else within.get(name)

    def of_process(self, name: str) -> Any:
        """What holds outside of blocks."""
        return self._value(name, self._assigned)

    def __repr__(self) -> str:
        rows = (f"{name}={getattr(self, name)!r}  # {row.variable}: {row.meaning}" for name, row in _SETTINGS.items())
        return "whorl.settings\n  " + "\n  ".join(rows)

    def __dir__(self) -> list[str]:
        return list(_SETTINGS)


def _known(name: str) -> _Setting:
    if name not in _SETTINGS:
        raise SettingError(f"whorl has no setting {name!r}: the settings are {', '.join(_SETTINGS)}.")
    return _SETTINGS[name]


settings = Settings()
