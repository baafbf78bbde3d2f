"""Which process this is among those that share a dataset: ranks of a job, and the workers of each rank."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

_of_parent: list[tuple[int, int]] = []


class Share(NamedTuple):
    """The part of one process: worker `worker` of `num_workers`, in rank `rank` of `world_size`.

    The words are torch's. A process that is no worker is worker 0 of 1.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def processes(self) -> int:
        """How many processes share the dataset."""
        return self.world_size * self.num_workers


def find_share(group: object = None) -> Share:
    """Find out which process this is.

    The rank comes from the variables ``RANK`` and ``WORLD_SIZE``, else from torch.distributed where it is initialised,
    else from the process that started this one as a worker (`inherit_rank`); the worker from ``WORKER`` and
    ``NUM_WORKERS``, else from torch's DataLoader. torch is asked only if it is loaded already: neither can be set up
    without it.

    Args:
        group: The process group of torch.distributed; None for the default one.

    Raises:
        ValueError: A variable is no number, or a rank is not below its count.
    """
    own = _of_variables("RANK", "WORLD_SIZE") or _of_torch_distributed(group)
    rank, world_size = own or (_of_parent[0] if _of_parent else (0, 1))
    worker, num_workers = _of_variables("WORKER", "NUM_WORKERS") or _of_torch_worker() or (0, 1)
    return Share(rank, world_size, worker, num_workers)


def inherit_rank(rank: int, world_size: int) -> None:
    """Tell this process the rank of the one that started it.

    A worker that is started afresh (spawn, forkserver) is in no process group: it would take its rank for the only one,
    and each rank would read everything.
    """
    _of_parent[:] = [(rank, world_size)]


def torch_worker() -> int | None:
    """Return the number of the DataLoader worker that this process is, or None."""
    found = _of_torch_worker()
    return None if found is None else found[0]


def _of_variables(number: str, count: str) -> tuple[int, int] | None:
    if number not in os.environ or count not in os.environ:
        return None
    texts = os.environ[number], os.environ[count]
    try:
        found = int(texts[0]), int(texts[1])
    except ValueError:
        raise ValueError(f"{number}={texts[0]!r}, {count}={texts[1]!r}: these variables are whole numbers") from None
    if not 0 <= found[0] < found[1]:
        raise ValueError(f"{number}={found[0]} is not below {count}={found[1]}")
    return found


def _of_torch_distributed(group: object) -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(group=group), distributed.get_world_size(group=group)


def _of_torch_worker() -> tuple[int, int] | None:
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)
