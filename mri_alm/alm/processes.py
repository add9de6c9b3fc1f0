"""Several processes, one objective: who is who, and a batch gathered from all of them."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mri_alm.errors import InputError


def world_size() -> int:
    """Number of processes that train one model together; 1 without ``torch.distributed``."""
    return dist.get_world_size() if _running() else 1


def process_rank() -> int:
    """This process's number among them, from 0."""
    return dist.get_rank() if _running() else 0


def start(device: torch.device) -> None:
    """Join the processes that ``torchrun`` started.

    Raises:
        InputError: If this process was not started by ``torchrun``.
    """
    if not dist.is_torchelastic_launched():
        raise InputError(
            "configs/multi_gpu.json needs torchrun: "
            "torchrun --standalone --nproc_per_node=2 -m monai.bundle run --config_file ..."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop() -> None:
    """Leave them."""
    if _running():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait until every process is here."""
    if _running():
        dist.barrier()


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """What the first process makes here, the others find made."""
    if process_rank() > 0:
        barrier()
    yield
    if process_rank() == 0:
        barrier()


def gather(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows of all processes, in the order of their ranks; each may have another number of them.

    The gradient of a quantity that **every process computes from the gathered rows** reaches this process's own rows,
    multiplied by the number of processes: averaged over the processes, as ``DistributedDataParallel`` does, it is the
    gradient that one process would have had. Nothing is communicated in the backward pass.

    Args:
        tensors: Each ``(B, ...)``, with the same B.

    Returns:
        Each ``(sum of B, ...)``; with one process ``tensors`` themselves.
    """
    world = world_size()
    if world == 1:
        return tensors
    device = tensors[0].device
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(tensors[0])], device=device))
    sizes = [int(count) for count in counts]
    return tuple(_rows_of_all(tensor, sizes) for tensor in tensors)


def _rows_of_all(tensor: Tensor, sizes: list[int]) -> Tensor:
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    rows = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    if tensor.requires_grad:
        own = tensor.clone()
        own.register_hook(lambda gradient: gradient * len(sizes))  # type: ignore[no-untyped-call]
        rows[process_rank()] = own
    return torch.cat(rows)


def first_visits(index: Tensor) -> Tensor:
    """Rows of the first visit of every sample, ascending: without the copies that pad the shares of the processes."""
    ordered, order = index.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first].sort().values


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()
