"""A start that failed for memory: the culprit, the numbers and the flag to set, from vLLM's own words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, write_fake_model

from rft_core.errors import ServiceError
from rft_engine.process.gpu_processes import Device, DeviceProcess, nvidia_inventory, parse_inventory, visible_device
from rft_engine.process.process_engine import ProcessBackend
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.out_of_memory import memory_error
from rft_engine.vllm.settings import VllmSettings

AT_START = (
    "Free memory on device cuda:0 ({free}/79.1 GiB) on startup is less than desired GPU memory utilization "
    "({share}, {wanted} GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
ONE_SEQUENCE = (
    "To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.5 GiB). {known}Try increasing `gpu_memory_utilization` (which also controls "
    "CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine."
)
ESTIMATE = "Based on the available memory, the estimated maximum model length is 12288. "
NO_BLOCKS = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing."
WARM_UP = (
    "CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` "
    "or `gpu_memory_utilization` when initializing the engine."
)
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)
NODE = (
    "Available memory on node 0 (3.1/16.0 GiB) on kv cache allocation is less than requested memory for kv (8.0 GiB). "
    "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)
FREE = {"free": 30.0, "share": 0.9, "wanted": 71.2}


def gpu(free_mib: int, *processes: tuple[int, str, int]) -> list[Device]:
    held = tuple(DeviceProcess(pid, name, used, "GPU-a") for pid, name, used in processes)
    return [Device(0, "GPU-a", 81000, free_mib, held)]


OTHER, OWN = (4711, "python", 50000), (os.getpid(), "rft-train", 50000)
CASES: list[tuple[str, str, list[Device], dict[str, Any], str, str]] = [
    (
        "another run",
        AT_START.format(**FREE),
        gpu(30000, OTHER),
        {},
        "others",
        "end process 4711 (python), or --engine_mem_util 0.37",
    ),
    ("the trainer", AT_START.format(**FREE), gpu(30000, OWN), {}, "own", "--engine_mem_util 0.37"),
    (
        "another container",
        AT_START.format(**FREE),
        gpu(30000),
        {},
        "hidden",
        "ask for a free device, or --engine_mem_util 0.37",
    ),
    (
        "a share above what is free",
        AT_START.format(free=77.0, share=0.99, wanted=78.3),
        gpu(78800),
        {"memory_utilization": 0.99},
        "share_too_high",
        "--engine_mem_util 0.96",
    ),
    (
        "a small process and a full device",
        AT_START.format(free=2.0, share=0.5, wanted=39.6),
        gpu(2000, (9, "display", 300), OTHER, (8, "vllm", 27000)),
        {"memory_utilization": 0.5},
        "others",
        "end process 4711 (python)",
    ),
    (
        "a long sequence",
        ONE_SEQUENCE.format(known=ESTIMATE),
        gpu(40000),
        {"memory_utilization": 0.3},
        "length",
        "--engine_mem_util 0.34, or --max_len 12288",
    ),
    (
        "a long sequence where no share is left",
        ONE_SEQUENCE.format(known=ESTIMATE),
        gpu(800),
        {"memory_utilization": 0.94},
        "length",
        "--max_len 12288",
    ),
    ("a small share", NO_BLOCKS, gpu(40000), {"memory_utilization": 0.3}, "share_too_low", "--engine_mem_util 0.4"),
    ("many rows", WARM_UP, gpu(40000), {}, "rows", "--engine_max_rows 128, or --engine_mem_util 0.87"),
    (
        "the host",
        "[Errno 12] Cannot allocate memory",
        [],
        {"max_rows": 64},
        "host",
        "free memory on this machine, --engine_max_rows 32",
    ),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


def settings_of(model_dir: Path, **fields: Any) -> VllmSettings:
    return VllmSettings(**{"model_dir": model_dir, "max_rows": 256, "max_len": 1024, **fields})


@pytest.mark.parametrize(
    ("words", "devices", "fields", "culprit", "remedy"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_culprit_is_named_with_the_flag_to_set(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    devices: list[Device],
    fields: Any,
    culprit: str,
    remedy: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def full(self: FakeVllm, arguments: dict[str, object]) -> None:
        raise ValueError(words)

    monkeypatch.setattr(FakeVllm, "make_llm", full)
    with pytest.raises(ServiceError) as caught:
        LocalVllm(settings_of(model_dir, **fields), FakeVllm(is_cpu=False), in_process=True, inventory=lambda: devices)
    problem = caught.value.problem
    assert problem.code == f"engine.vllm.memory.{culprit}"
    assert problem.do.startswith(remedy)
    for device in devices:
        assert all(f"pid {p.pid} {p.name} {p.used_mib} MiB" in problem.where for p in device.processes)


@pytest.mark.parametrize(
    ("words", "devices", "fields", "culprit", "remedy"),
    [
        (NO_BLOCKS, [], {"memory_utilization": 0.93}, "model_too_large", "--engine_tp_size 2"),
        (ONE_SEQUENCE.format(known=""), [], {}, "length", "--engine_tp_size 2"),
        (TORCH, gpu(1000, OTHER), {"memory_utilization": 0.5}, "others", "end process 4711 (python), or --engine_mem"),
        (TORCH, gpu(1000, OWN), {"memory_utilization": 0.5}, "share_too_high", "--engine_mem_util 0.4"),
        (NODE, [], {}, "host", "free memory on this machine"),
    ],
)
def test_other_words_for_it(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    devices: list[Device],
    fields: Any,
    culprit: str,
    remedy: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    error = memory_error(settings_of(model_dir, **fields), words.replace(" ", "\n  ", 3), lambda: devices)
    assert error is not None
    assert error.problem.code == f"engine.vllm.memory.{culprit}"
    assert error.problem.do.startswith(remedy)


def test_blocks_are_counted_for_one_sequence(model_dir: Path) -> None:
    error = memory_error(settings_of(model_dir), ONE_SEQUENCE.format(known=ESTIMATE), lambda: [])
    assert error is not None
    assert "needs 2048 blocks of 16 tokens (4 GiB), 768 are there (1.5 GiB)" in error.problem.what


@pytest.mark.parametrize("words", ["", "KeyError: 'lm_head.weight'", "Connection refused"])
def test_words_about_something_else_are_left_alone(model_dir: Path, words: str) -> None:
    assert memory_error(settings_of(model_dir), words, lambda: gpu(10, OTHER)) is None


def test_a_process_that_died_for_memory_says_so(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import sys; print({TORCH!r}); sys.exit(1)"]
    settings, inventory = settings_of(model_dir), lambda: gpu(1000, OTHER)
    with pytest.raises(ServiceError) as caught:
        ProcessBackend(settings, command, {}, tmp_path / "log", lambda log: memory_error(settings, log, inventory))
    assert caught.value.problem.code == "engine.vllm.memory.others"


def test_tables_of_nvidia_smi_are_read() -> None:
    gpus = "0, GPU-a, 81559, 30000\n1, GPU-b, 81559, 81000\n"
    processes = "GPU-a, 4711, /usr/bin/python, with comma, 50000\nGPU-a, 12, [N/A], [N/A]\n"
    first, second = parse_inventory(gpus, processes)
    assert [(p.pid, p.name, p.used_mib) for p in first.processes] == [
        (4711, "/usr/bin/python, with comma", 50000),
        (12, "[N/A]", 0),
    ]
    assert (first.hidden_mib, second.processes, second.hidden_mib) == (1559, (), 559)
    for shown, number, expected in (
        (None, 1, second),
        ("1", 0, second),
        ("1,0", 1, first),
        ("GPU-b", 0, second),
        ("", 0, None),
        ("1", 1, None),
    ):
        environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        assert visible_device([first, second], number, environment) == expected


def test_a_machine_without_nvidia_smi_has_no_inventory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_inventory() == []


def test_the_engine_passes_the_error_on(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FakeVllm, arguments: dict[str, object]) -> None:
        raise RuntimeError(WARM_UP)

    monkeypatch.setattr(FakeVllm, "make_llm", full)
    with pytest.raises(ServiceError, match="256 sequences") as caught:
        VllmEngine(settings_of(model_dir), list, runtime=FakeVllm(is_cpu=False))
    assert caught.value.problem.code == "engine.vllm.memory.rows"
