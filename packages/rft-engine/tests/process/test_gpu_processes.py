"""GPUs and their processes as `nvidia-smi` lists them, and which one a number of this process means."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from rft_engine.process import gpu_processes
from rft_engine.process.gpu_processes import Device, DeviceProcess, nvidia_inventory, parse_inventory, visible_device

GPUS = "0, GPU-aa1, 81000, 30000\n\n 3 , GPU-aa2, 40000, [N/A]\n"
PROCESSES = "GPU-aa1, 17, python, 500\nGPU-aa2, 18, a, b, 600\nGPU-aa1, 19, x, [N/A]\n\n"
FIRST = (DeviceProcess(17, "python", 500, "GPU-aa1"), DeviceProcess(19, "x", 0, "GPU-aa1"))
DEVICES = [
    Device(0, "GPU-aa1", 81000, 30000, FIRST),
    Device(3, "GPU-aa2", 40000, 0, (DeviceProcess(18, "a, b", 600, "GPU-aa2"),)),
]


def test_each_gpu_has_its_own_processes_and_the_rest_of_its_memory_is_hidden() -> None:
    assert parse_inventory(GPUS, PROCESSES) == DEVICES
    assert [device.hidden_mib for device in DEVICES] == [81000 - 30000 - 500, 40000 - 600]
    assert Device(0, "x", 100, 60, (DeviceProcess(1, "p", 50),)).hidden_mib == 0
    assert parse_inventory("", PROCESSES) == []


@pytest.mark.parametrize("answer", [GPUS, "", OSError("no such program"), subprocess.TimeoutExpired("x", 1.0)])
def test_both_tables_are_asked_for_and_an_error_is_no_device(
    monkeypatch: pytest.MonkeyPatch, answer: str | Exception
) -> None:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options))
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer if "gpu=" in command[1] else PROCESSES)

    monkeypatch.setattr(gpu_processes.subprocess, "run", run)
    assert nvidia_inventory() == (DEVICES if answer == GPUS else [])
    queries = [
        "--query-gpu=index,uuid,memory.total,memory.free",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory",
    ]
    for (command, options), query in zip(asked, queries if answer == GPUS else queries[:1], strict=True):
        assert command == ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        assert options.pop("timeout") > 0
        assert options == {"capture_output": True, "text": True, "check": True}


@pytest.mark.parametrize(
    ("shown", "number", "found"),
    [
        (None, 0, 0),
        (None, 1, 1),
        (None, 2, None),
        ("3,0", 0, 1),
        ("3, 0", 1, 0),
        ("GPU-aa2", 0, 1),
        ("GPU-aa", 0, None),
        ("1", 0, None),
        ("", 0, None),
        ("3", 1, None),
    ],
)
def test_a_number_means_the_gpu_that_the_environment_shows_there(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, number: int, found: int | None
) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    wanted = None if found is None else DEVICES[found]
    assert visible_device(DEVICES, number, environment) == wanted
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_device(DEVICES, number) == wanted
