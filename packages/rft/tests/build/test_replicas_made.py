"""Replicas of an engine: the weights that they are sent, their GPUs, and what is closed where one fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build import replicas
from rft.settings import RlSettings
from rft_core.errors import PreflightError, ServiceError
from rft_engine.settings import EngineSettings, ReplicaSettings
from rft_models.settings import ModelSettings
from rft_trainer.settings.rollouts import AsyncSettings

PLAIN = RlSettings(
    model=ModelSettings(pretrain="m", device="cpu", model_code="code.py", flash_attn=True),
    engine=EngineSettings(engine_max_rows=7),
    replicas=ReplicaSettings(engine_replicas=2),
)


@pytest.mark.parametrize(("number", "staleness", "wanted"), [(1, 0, False), (2, 0, True), (1, 1, True), (2, 1, True)])
def test_engines_have_processes_where_there_are_several_or_one_runs_ahead(
    number: int, staleness: int, wanted: bool
) -> None:
    settings = replace(
        PLAIN,
        replicas=ReplicaSettings(engine_replicas=number),
        async_rollouts=AsyncSettings(max_staleness=staleness),
    )
    assert replicas.wants_replicas(settings) is wanted


class Started:
    """Replicas that are started; with a fault those that are not healthy do not get ready."""

    def __init__(
        self,
        calls: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        shares: bool,
        fault: BaseException | None = None,
        healthy: Sequence[int] = (0,),
    ) -> None:
        self.calls, self.fault, self.healthy = calls, fault, healthy
        self.native: dict[int, Any] = {}
        self.external: dict[int, Any] = {}
        self.closed: list[int] = []
        self.engine = calls.double("engine")
        self.store = calls.double("store")
        choice = SimpleNamespace(shares_weights=shares, kind="kind")
        calls.put(
            replicas,
            "CollectiveWeightProvider",
            choose_engine=choice,
            ReplicaEngine=self.engine,
            SharedWeightStore=self.store,
            to_checkpoint_names="renamed",
            usable_cores=12,
        )
        calls.replace(
            replicas,
            ProcessReplica=self._native,
            ExternalEngineReplica=self._external,
            build_engine=lambda kind, request: (kind, request),
        )
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def _replica(self, number: int) -> Any:
        def ready() -> None:
            if self.fault is not None and number not in self.healthy:
                raise self.fault

        return SimpleNamespace(number=number, ready=ready, close=lambda: self.closed.append(number))

    def _native(self, number: int, worker: Any, model: Any, **options: Any) -> Any:
        assert worker == replicas.WORKER
        self.native[number] = (model, options)
        return self._replica(number)

    def _external(self, number: int, build: Any) -> Any:
        self.external[number] = build
        return self._replica(number)

    def make(self, settings: RlSettings = PLAIN, device: str = "cpu", adapters: Any = None, **options: Any) -> Any:
        parameters = [("a", torch.nn.Parameter(torch.zeros(6)))]
        policy: Any = SimpleNamespace(
            adapters=adapters,
            model="model",
            base_parameters=lambda: parameters,
            merged_parameters=lambda named: ("merged", named),
        )
        machine: Any = SimpleNamespace(device=device, ranks=SimpleNamespace(rank=3, local_rank=1, world_size=2))
        usual: dict[str, Any] = {"weights": lambda: "whole", "dtype": torch.bfloat16}
        return replicas.make_replicas(settings, machine, policy, "source", 40, Path("logs"), **usual | options)


def test_native_replicas_get_the_architecture_and_the_cores_that_are_left(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(calls, monkeypatch, shares=True)
    assert started.make() == "engine"
    made = [call for call in calls.taken() if call != "usable_cores()"]
    assert made[0] == f"choose_engine({PLAIN.engine!r}, 'cpu')"
    assert made[1].endswith("torch.bfloat16, num_bytes=12, together=None)")
    assert made[2].startswith("ReplicaEngine([")
    assert "store, lost={}, max_len=40, notify=" in made[2]
    assert made[3:] == ["engine.refresh()"]
    assert sorted(started.native) == [0, 1]
    for number, (model, options) in started.native.items():
        assert model == {
            "model_dir": str(Path("m").resolve()),
            "dtype": "bfloat16",
            "device": "cpu",
            "flash_attn": True,
            "model_code": "code.py",
            "graphs": True,
            "num_threads": 3,
            "gives_way": False,
        }
        assert options == {
            "max_rows": 7,
            "max_len": 40,
            "log_path": Path(f"logs/replica-3-{number}.log"),
            "environment": {},
        }
    assert started.closed == []


def test_a_replica_that_runs_ahead_gives_way_and_one_with_adapters_reads_their_base(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(calls, monkeypatch, shares=True)
    ahead = replace(
        PLAIN,
        async_rollouts=AsyncSettings(max_staleness=1),
        engine=EngineSettings(engine_enforce_eager=True),
        replicas=ReplicaSettings(engine_replicas=1),
    )
    monkeypatch.setattr(replicas, "usable_cores", lambda: 1)
    started.make(ahead, adapters="adapters")
    model, _ = started.native[0]
    assert (model["gives_way"], model["graphs"], model["num_threads"]) == (True, False, 1)
    assert model["model_dir"] == str(Path("source").resolve())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    started.make(ahead, device="cuda:1")
    model, options = started.native[0]
    assert (model["gives_way"], model["device"]) == (False, "cuda:0")
    assert options["environment"] == {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_weights_are_merged_and_where_ranks_have_blocks_gathered_together(
    calls: Any, monkeypatch: pytest.MonkeyPatch, in_blocks: bool, shares: bool
) -> None:
    started = Started(calls, monkeypatch, shares=shares)
    providers: list[Any] = []

    def store(provider: Any, dtype: torch.dtype, **options: Any) -> Any:
        providers.append((provider, dtype, options))
        return started.store

    renamed: list[Any] = []
    calls.replace(
        replicas,
        SharedWeightStore=store,
        to_checkpoint_names=lambda model, named: (renamed.append((model, named)), named)[1],
        CollectiveWeightProvider=Agreed,
    )
    started.make(in_blocks=in_blocks)
    [(provider, dtype, options)] = providers
    assert provider() == ("merged", "whole of 3" if in_blocks else "whole")
    assert (dtype, options) == (torch.bfloat16, {"num_bytes": 12, "together": "together" if in_blocks else None})
    assert [(model, named) for model, named in renamed] == ([] if shares else [("model", provider)])


class Agreed:
    """Weights that all ranks gather in the same call."""

    def __init__(self, weights: Any, *, rank: int) -> None:
        self._weights, self._rank, self.together = weights, rank, "together"

    def __call__(self) -> str:
        return f"{self._weights()} of {self._rank}"


def test_engines_with_processes_of_their_own_load_snapshots(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(calls, monkeypatch, shares=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    started.make(device="cuda:1")
    assert sorted(started.external) == [0, 1]
    assert started.native == {}
    for number, names in ((0, "e"), (1, "f")):
        kind, request = started.external[number]("snapshot")
        assert (kind, request.settings, request.model_dir, request.max_len) == ("kind", PLAIN.engine, "source", 40)
        assert (request.device, request.dtype, request.weights) == ("cuda:1", "bfloat16", "snapshot")
        assert request.from_snapshot
        assert request.environment == {"CUDA_VISIBLE_DEVICES": names}
        assert request.log_path == Path(f"logs/replica-3-{number}.log")


@pytest.mark.parametrize(
    ("size", "number", "visible", "first"),
    [(1, 1, 4, ["3"]), (1, 2, 6, ["4", "5"]), (2, 2, 10, ["6,7", "8,9"]), (2, 1, 6, ["4,5"])],
)
def test_replicas_have_the_gpus_after_those_of_the_ranks(
    calls: Any, monkeypatch: pytest.MonkeyPatch, size: int, number: int, visible: int, first: list[str]
) -> None:
    started = Started(calls, monkeypatch, shares=False)
    settings = replace(
        PLAIN, engine=EngineSettings(engine_tp_size=size), replicas=ReplicaSettings(engine_replicas=number)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    started.make(settings, device="cuda:1")
    found = [started.external[index](None)[1].environment["CUDA_VISIBLE_DEVICES"] for index in range(number)]
    assert found == first
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible - 1)
    with pytest.raises(PreflightError) as caught:
        started.make(settings, device="cuda:1")
    assert caught.value.problem.code == "engine.replicas.devices"


def test_one_that_does_not_start_is_left_to_the_engine_beside_one_that_does(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ServiceError(code="engine.died", what="no memory", where="log", why="", do="")
    started = Started(calls, monkeypatch, shares=True, fault=fault)
    given: dict[str, Any] = {}
    monkeypatch.setattr(replicas, "ReplicaEngine", lambda made, store, **named: given.update(named) or started.engine)
    started.make()
    assert given["lost"] == {1: fault}
    assert started.closed == [1]
    for number, code in ((2, "engine.replicas.start"), (1, "engine.died")):
        started = Started(calls, monkeypatch, shares=True, fault=fault, healthy=())
        with pytest.raises(ServiceError) as caught:
            started.make(replace(PLAIN, replicas=ReplicaSettings(engine_replicas=number)))
        assert caught.value.problem.code == code
        assert "no memory" in caught.value.problem.what
        assert set(started.closed) == set(range(number))


def test_all_are_closed_where_one_fails_or_the_first_weights_do(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(calls, monkeypatch, shares=True, fault=MemoryError())
    with pytest.raises(MemoryError):
        started.make()
    # the one that did not get ready closes itself
    assert sorted(started.closed) == [0, 1]
    assert calls.taken()[-1] == "store.close()"
    started = Started(calls, monkeypatch, shares=True)

    def refresh() -> None:
        raise ZeroDivisionError

    started.engine.refresh = refresh
    with pytest.raises(ZeroDivisionError):
        started.make()
    assert sorted(started.closed) == [0, 1]
    assert calls.taken()[-1] == "store.close()"
