"""The exceptions and the warning of whorl.  A message says what was asked, what is wrong, what to write instead."""


class CellError(ValueError):
    """A cell is declared or written in a way that cannot be traced; the message names the line to change."""


class InputError(ValueError):
    """An argument that no engine could run: a wrong shape, dtype, name or file."""


class SettingError(InputError, AttributeError):
    """A setting that whorl does not have."""


class UnsupportedError(RuntimeError):
    """The engine asked for by name cannot run this problem; the message lists every reason."""


class CompileError(RuntimeError):
    """A kernel could not be compiled or kept on this machine; the message has the compiler's own words."""


class SlowError(UnsupportedError):
    """`whorl.settings.slow` is "error" and only a loop over time in Python could run this problem."""


class SlowWarning(UserWarning):
    """A layer runs as a loop over time in Python; the message lists the reasons against every faster engine."""


class KernelError(RuntimeError):
    """A kernel cannot be compiled, stored, loaded or launched; the message has what the compiler or driver says."""
