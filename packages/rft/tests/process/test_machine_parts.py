"""Process of a rank: its device, the order in which it joins, and what follows its health monitor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.process import machine
from rft.process.machine import Machine, choose_device, open_machine
from rft_core.errors import PeerError, PreflightError
from rft_dist.settings import WatchSettings
from rft_trainer.runs.checkpointing import Progress

PEER = PeerError(code="launch.rendezvous_incomplete", what="w", where="h", why="y", do="d")


@pytest.mark.parametrize(
    ("wanted", "gpus", "rank", "device"),
    [
        ("cpu", 4, 1, "cpu"),
        ("auto", 0, 1, "cpu"),
        ("auto", 4, 1, "cuda:1"),
        ("cuda", 4, 5, "cuda:1"),
        ("cuda", 0, 0, None),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_or_the_cpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: int, rank: int, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if device is not None:
        assert choose_device(wanted, rank) == device
        return
    with pytest.raises(PreflightError) as caught:
        choose_device(wanted, rank)
    assert caught.value.problem.code == "device.no_cuda"


class Joined:
    """The steps of joining as doubles; two ranks on this machine, of which this is the second."""

    def __init__(self, calls: Any, monkeypatch: pytest.MonkeyPatch, *, cores: int = 8, rank: int = 1) -> None:
        self.ranks = calls.double("ranks", rank=rank, world_size=4, local_rank=1)
        grid = calls.double("grid", returns=SimpleNamespace(ranks_per_node=2))
        self.preflight = calls.double("preflight", grid=grid, run="run")
        self.log = calls.double("log")
        calls.put(
            machine,
            "repeat_exactly HealthConfig Activity start_process_group watched_process meet_ranks",
            ranks_from_environment=self.ranks,
            choose_device="cpu",
            requested_backend="gloo",
            Preflight=self.preflight,
            usable_cores=cores,
            first_line="first line",
            logged=self.log,
        )
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
        monkeypatch.setattr(torch, "set_num_threads", calls.double("set_num_threads"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def test_a_rank_of_a_run_is_compared_logged_and_watched_before_it_computes(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Joined(calls, monkeypatch)
    request, limits, show = (calls.double(name) for name in ("request", "limits", "show"))
    with open_machine("auto", request, limits, debug=True, command=["rft-train"], show_error=show) as found:
        assert calls.taken() == [
            "ranks_from_environment(num_local_devices=3)",
            "choose_device('auto', 1)",
            "Preflight(request)",
            "requested_backend()",
            "grid(ranks, num_devices=3, shares_devices=True)",
            "usable_cores()",
            "set_num_threads(4)",
            "repeat_exactly('cpu', debug=True)",
            "Activity()",
            "HealthConfig(Activity(), limits, always_compares=True)",
            "first_line(ranks, 'cpu', ['rft-train'])",
            "logged(1, 'first line')",
            "log begins",
            "meet_ranks(ranks)",
            "watched_process(ranks, HealthConfig(), log, show)",
            "watched_process() begins",
            "start_process_group(ranks, device(type='cpu'), compare=preflight.compare, store=meet_ranks(), "
            "watched=HealthConfig())",
            "preflight.report()",
        ]
        assert (found.device, found.ranks, found.collectives) == ("cpu", joined.ranks, "start_process_group()")
        assert (found.preflight, found.watched) == ("preflight.report()", "watched_process()")
        assert not found.is_first
    # nobody leaves before all have ended well
    assert calls.taken() == ["start_process_group().gather_bytes(b'')", "watched_process() ends", "log ends"]


def test_a_command_that_trains_nothing_compares_nothing(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Joined(calls, monkeypatch, rank=0)
    with open_machine("cpu") as found:
        made = calls.taken()
        assert made[0] == "ranks_from_environment(num_local_devices=0)"
        assert "set_num_threads(2)" in made
        assert f"HealthConfig(Activity(), {WatchSettings()!r}, always_compares=False)" in made
        assert not [call for call in made if "reflight" in call]
        assert any("compare=None" in call for call in made)
        assert found.preflight is None
        assert found.is_first


@pytest.mark.parametrize(
    ("device", "cores", "threads", "taken"),
    [("cpu", 8, None, [2]), ("cpu", 2, None, [1]), ("cpu", 24, None, []), ("cpu", 8, "3", []), ("cuda:0", 8, None, [])],
)
def test_a_rank_on_a_cpu_takes_its_share_of_the_cores_and_no_more(
    calls: Any, monkeypatch: pytest.MonkeyPatch, device: str, cores: int, threads: str | None, taken: list[int]
) -> None:
    Joined(calls, monkeypatch, cores=cores)
    calls.put(machine, choose_device=device)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with open_machine("auto"):
        pass
    assert [call for call in calls.taken() if "set_num_threads" in call] == [
        f"set_num_threads({number})" for number in taken
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_ranks_that_do_not_meet_leave_it_in_the_log_of_their_run(
    calls: Any, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    Joined(calls, monkeypatch)

    def nobody(ranks: Any) -> None:
        raise PEER

    calls.replace(machine, meet_ranks=nobody)
    with pytest.raises(PeerError), open_machine("auto", calls.double("request") if trains else None):
        pass
    made, written = calls.taken(), f"{PEER}\n"
    assert [call for call in made if call.startswith("log")] == [
        "logged(1, 'first line')",
        "log begins",
        f"log.write({written!r})",
        *(["log.attach('run')"] if trains else []),
        "log ends",
    ]
    assert not [call for call in made if call.startswith("watched_process")]


def test_what_is_watched_follows_the_run(calls: Any) -> None:
    watched = calls.double("watched")
    calls.replace(machine, PhaseTimer=lambda **given: given)
    one = Machine("cpu", calls.double("ranks"), calls.double("collectives"), None, watched)
    one.attach(Path("run"), "resume")
    one.forget_last_failure()
    progress = Progress()
    progress.step = 4
    followed: list[Any] = []
    watched.watch.activity.follow = followed.append
    meter = calls.double("meter")
    timer: Any = one.phase_timer(progress, meter)
    assert followed[0]() == 5
    assert (timer["listener"], timer["meter"]) == (watched, meter)
    watched.watch.activity.waited = 7.5
    assert timer["waited"]() == 7.5
    assert calls.taken() == [f"watched.attach({Path('run')!r}, 'resume')", "watched.watch.folder.clear()"]
    alone = Machine("cpu", calls.double("ranks"), calls.double("collectives"))
    alone.attach(Path("run"), "resume")
    alone.forget_last_failure()
    assert alone.phase_timer(progress) == {"meter": None}


@pytest.mark.parametrize(
    ("world_size", "threads", "variable", "text"),
    [
        (1, 1, None, "1 process on meta, 1 torch thread each (of 8 usable cores)"),
        (2, 2, "2", "2 ranks on meta, 2 torch threads each (OMP_NUM_THREADS=2)"),
    ],
)
def test_a_machine_is_described_in_a_line(
    calls: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, threads: int, variable: str | None, text: str
) -> None:
    calls.put(machine, usable_cores=8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    one = Machine("meta", calls.double("ranks", world_size=world_size), calls.double("collectives"))
    assert one.describe() == text
