"""Layers that have run already, as if they had not: what a test has changed is then in their kernels."""

import pytest

from whorl.engines import taped
from whorl.engines.cuda import launch, layers


def made_anew(patch: pytest.MonkeyPatch, loaded: bool = False) -> None:
    """Every plan is made ready anew, those too that layers remember.

    Args:
        loaded: its kernels are loaded anew as well: their source is another.
    """
    patch.setattr(layers, "_prepared", {})
    patch.setattr(taped, "run_like", lambda *given: ())
    if loaded:
        patch.setattr(launch, "_loaded", {})
