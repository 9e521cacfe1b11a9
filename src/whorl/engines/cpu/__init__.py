"""Engine `cpu`."""

from whorl.engines.cpu.engine import CPU

__all__ = ["CPU"]
