"""Engine `cpu` in the workers of a DataLoader: processes forked after the parent has used it with several threads."""

import os
import subprocess
import sys

import pytest

from whorl import compiler

SCRIPT = """
import torch, whorl
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
layer, data = whorl.LSTM(16, 48, 2, engine="cpu"), torch.randn(6, 12, 8, 16)


def results(index):
    y, (h, c) = layer(data[index], mask=torch.ones(12, 8, dtype=torch.bool))
    return [y.detach(), h.detach(), *torch.autograd.grad(y.square().sum() + c.sum(), list(layer.parameters()))]


class Prepared(Dataset):
    def __init__(self, threads):
        self.threads = threads

    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        # for the layer alone: torch's own operators wait for ever where OpenMP's threads did not survive the fork
        torch.set_num_threads(self.threads)
        found = results(index)
        torch.set_num_threads(1)
        return found


wanted = [results(index) for index in range(len(data))]
for threads in (1, 2):
    loader = DataLoader(Prepared(threads), None, num_workers=2, multiprocessing_context="fork")
    for found, truth in zip(loader, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))
"""


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_the_workers_of_a_data_loader_train_to_the_same_bits() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
