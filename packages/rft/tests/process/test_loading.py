"""Memory that runs out while models are loaded is told apart from that of a micro-batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.process.loading import loading
from rft_core.errors import PreflightError, ServiceError
from rft_engine.process.gpu_processes import Device, DeviceProcess

RESOLVED: Any = SimpleNamespace(command="sft")


def machine(device: str) -> Any:
    return SimpleNamespace(device=device, ranks=SimpleNamespace(rank=1))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"),
        MemoryError(),
    ],
)
def test_memory_of_the_host(error: Exception) -> None:
    with pytest.raises(ServiceError) as caught, loading(RESOLVED, machine("cpu"), lambda: []):
        raise error
    problem = caught.value.problem
    assert problem.code == "memory.loading"
    assert (str(error).splitlines() or ["MemoryError"])[0] in problem.what
    assert problem.where == "rank 1 on cpu"
    assert problem.do.startswith("rft-train plan sft with the same flags names")


def test_memory_of_a_gpu_and_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 80 * 2**30))
    held = Device(0, "GPU-a", 81920, 1, (DeviceProcess(7, "other", 50000, "GPU-a"),))
    with pytest.raises(ServiceError) as caught, loading(RESOLVED, machine("cuda:0"), lambda: [held]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    problem = caught.value.problem
    assert "Tried to allocate 2.00 GiB; 1 of 81,920 MiB are free" in problem.what
    assert "held by pid 7 (other) 50,000 MiB" in problem.where
    assert "--gpu_memory 80" in problem.do


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), PreflightError(code="a", what="b", where="c", why="d")]
)
def test_another_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, loading(RESOLVED, machine("cpu"), lambda: []):
        raise error
    assert caught.value is error
