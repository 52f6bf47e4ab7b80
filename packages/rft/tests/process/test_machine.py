"""Threads and arithmetic: chosen from what the process may use, and said."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rft.process import cores as cores_module
from rft.process import machine
from rft.process.machine import bfloat16_arithmetic, open_machine
from rft_core.errors import PeerError
from rft_dist.launch import rendezvous
from rft_dist.planning.parallel_dims import BatchShare, SourcedNumber
from rft_dist.preflight.run_preflight import RequestedRun


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """What other tests find is put back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, cores: int, quota: str) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    monkeypatch.setattr(cores_module, "_QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)


def test_threads_are_lowered_to_what_may_be_used_and_never_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given(monkeypatch, tmp_path, cores=8, quota="200000 100000")
    torch.set_num_threads(5)
    with open_machine("cpu") as opened:
        assert torch.get_num_threads() == 2
        assert opened.describe() == "1 process on cpu, 2 torch threads each (of 2 usable cores)"
    torch.set_num_threads(1)
    with open_machine("cpu") as opened:
        assert opened.describe() == "1 process on cpu, 1 torch thread each (of 2 usable cores)"


def test_a_number_that_the_environment_gives_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    given(monkeypatch, tmp_path, cores=8, quota="200000 100000")
    torch.set_num_threads(3)
    with open_machine("cpu") as opened:
        assert opened.describe() == "1 process on cpu, 3 torch threads each (OMP_NUM_THREADS=3)"


def test_a_rank_that_nobody_joins_says_so_and_leaves_it_in_the_log_of_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = f"{listener.getsockname()[1]}"
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0", "RFT_START_TIMEOUT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_SECONDS", 0.3)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "logs").mkdir()
    one = SourcedNumber(1, "default")
    request = RequestedRun(
        directory=tmp_path,
        nproc=one,
        share=BatchShare("train_batch_size", 2, 1),
        sp_size=one,
        tp_size=one,
        values={},
        models=dict,
        files={},
    )
    with pytest.raises(PeerError, match="present 0, missing 1") as caught, open_machine("cpu", request):
        pass
    assert caught.value.problem.code == "launch.rendezvous_incomplete"
    assert "export RFT_START_TIMEOUT=" in caught.value.problem.do
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    for words in (f"waiting for 1 of 2 ranks at 127.0.0.1:{port}", "rendezvous incomplete after 1 s"):
        assert words in log
    assert f"waiting for 1 of 2 ranks at 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_processor_without_bfloat16_instructions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_multiplies_bf16", lambda: False)
    assert bfloat16_arithmetic("cpu").startswith("this processor has no bfloat16 instructions")
    monkeypatch.setattr(machine, "cpu_multiplies_bf16", lambda: True)
    assert bfloat16_arithmetic("cpu").startswith("products in bfloat16")


def test_a_gpu_that_emulates_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, told in ((True, ""), (False, "this GPU has no bfloat16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert bfloat16_arithmetic("cuda:0").startswith(told)
        assert bool(bfloat16_arithmetic("cuda:0")) == bool(told)
        assert ("--amp in the place of --bf16" in bfloat16_arithmetic("cuda:0")) == bool(told)
