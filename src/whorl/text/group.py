"""The processes that train one model together, started by `torchrun`: each learns its part of every batch's rows."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from whorl.errors import InputError

# torch 2.13 renamed it.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which torchrun sets


@dataclass(frozen=True)
class Group:
    """One of the processes that train together; a process alone is a group of one.

    Attributes:
        rank, size: which of how many it is.
        joined: gradients are exchanged through torch.distributed.
    """

    rank: int = 0
    size: int = 1
    joined: bool = False

    @property
    def warm_up(self) -> int:
        """Steps before one may be captured: torch measures and arranges the exchange in its first ten."""
        return 11 if self.joined else 3

    def exchanging(self, module: torch.nn.Module, compressed: bool) -> Any:
        """`module`, its gradients the mean over all processes, exchanged while backward still runs.

        Args:
            compressed: they travel in bfloat16.
        """
        if not self.joined:
            return module
        made = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        if compressed:
            made.register_comm_hook(None, bf16_compress_hook)
        return made

    def exchanged(self, module: Any, last: bool) -> AbstractContextManager[Any]:
        """The context of a forward and backward pass of what `exchanging` made: only the `last` of a step exchanges."""
        return module.no_sync() if self.joined and not last else nullcontext()

    def agree(self, wanted: bool) -> bool:
        """Whether any process wants it; all ask at the same step."""
        if not self.joined:
            return wanted
        flag = torch.tensor(float(wanted), device=self._device)
        distributed.all_reduce(flag)
        return bool(flag.item())

    def average(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` with its mean over all processes."""
        if self.joined:
            distributed.all_reduce(tensor)
            tensor /= self.size

    def averaging(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace `tensor` with its mean over all processes; what is given waits for it.

        A GPU waits in its own order; on CPUs all happens at the end.
        """
        if distributed.get_backend() == "nccl":
            work = distributed.all_reduce(tensor, distributed.ReduceOp.AVG, async_op=True)
            return lambda: work.wait() and None
        return lambda: self.average(tensor)

    def same(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` with that of the first process."""
        if self.joined:
            distributed.broadcast(tensor, 0)

    def joint(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The parts of all processes as one tensor, joined along `axis` in the order of their ranks."""
        if not self.joined:
            return tensor
        whole = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        _gather(whole, tensor.contiguous())
        return torch.cat(whole.chunk(self.size), axis) if axis else whole

    def told(self, value: Any) -> Any:
        """What the first process says, which every process gets; it is a text, a number or None."""
        if not self.joined:
            return value
        values = [value]
        distributed.broadcast_object_list(values, device=self._device)
        return values[0]

    def wait(self) -> None:
        """Wait for all processes."""
        if self.joined:
            self.agree(False)

    def leave(self) -> None:
        """Close the connections to the others, when all are done."""
        if self.joined:
            self.wait()
            distributed.destroy_process_group()

    @property
    def _device(self) -> torch.device:
        cuda = distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


ALONE = Group()


def is_called() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in VARIABLES)


def join(device: str) -> tuple[Group, str]:
    """The group that torchrun started this process in, and the device that is this process's own.

    Args:
        device: "auto", "cpu" or "cuda", as for a process alone.

    Raises:
        InputError: another device, or fewer GPUs than processes.
    """
    rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is {device!r}, but torchrun gives each process its own: write auto, cuda or cpu.")
    if device == "cpu" or not torch.cuda.is_available():
        distributed.init_process_group("gloo")
        return Group(rank, size, joined=True), "cpu"
    count = torch.cuda.device_count()
    if local >= count:
        raise InputError(f"torchrun started process {local} here, and torch sees {count} GPUs: start one for each.")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    distributed.init_process_group("nccl", device_id=own)
    return Group(rank, size, joined=True), str(own)
