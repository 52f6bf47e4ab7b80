"""Ranks as threads of one process with torch's collectives, for tests of what the ranks of a step do together."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from rft_dist.collectives import TorchCollectives


def run_in_threads(world_size: int, work: Callable[[TorchCollectives], Any]) -> list[Any]:
    """`work(collectives)` on every rank, each in a thread of its own; return what each returned.

    Groups, meshes, distributed tensors and FSDP2 work as between processes, by torch's own group for such tests. It
    adds in another order than gloo. Where a rank raises, the others stop, and the first error is raised here.
    """
    # its tests' group: imported where it is used, since it stays out of what users import
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    outcomes: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    store = HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            outcomes[rank] = work(TorchCollectives(torch.device("cpu")))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore
    isolate(True)
    threaded._install_threaded_pg()  # pyright: ignore[reportPrivateUsage]
    ranks = range(world_size)
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()  # pyright: ignore[reportPrivateUsage]
        isolate(False)
    if errors:
        raise errors[0]
    return outcomes


def rank_program(path: Path) -> ModuleType:
    """The program of a rank as a module, with what it imports from its own folder."""
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))
