"""The use of DeepSpeed's engine, step by step, with a double in its place."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.collectives import SingleProcess
from rft_dist.strategies.zero import optimizer as zero
from rft_dist.strategies.zero.optimizer import ZeroModel, ZeroOptimizer

CPU = torch.device("cpu")


class Engine:
    """Notes what it is asked for."""

    def __init__(self, root: Any = None, adamw: Any = None) -> None:
        self.root, self.device, self.world_size = root, CPU, 4
        self.asked: list[Any] = []
        self.applied, self.partitions = True, True
        self.optimizer: Any = SimpleNamespace(
            param_groups=[{"lr": 0.0, "rate_factor": 1.0}, {"lr": 0.0, "rate_factor": 0.5}],
            set_gradient_accumulation_boundary=lambda ends: self.asked.append(("boundary", ends)),
            setup_buckets=lambda: self.asked.append("buckets"),
            overlapping_partition_gradients_reduce_epilogue=lambda: self.asked.append("epilogue"),
        )

    def __call__(self, function: Any, *arguments: Any, **options: Any) -> Any:
        self.asked.append(("forward", os.environ.get("LOCAL_RANK")))
        return self.root(function, *arguments, **options)

    def backward(self, loss: Any, *, scale_wrt_gas: bool) -> None:
        self.asked.append(("backward", float(loss), scale_wrt_gas, os.environ.get("LOCAL_RANK")))

    def step(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.asked.append(("step", rates, os.environ.get("LOCAL_RANK")))

    def was_step_applied(self) -> bool:
        return self.applied

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(2.5)

    def zero_optimization_partition_gradients(self) -> bool:
        return self.partitions

    def destroy(self) -> None:
        self.asked.append("destroy")


class State:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def average(self) -> None:
        self.engine.asked.append("average")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (name, *arguments)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, ZeroOptimizer]:
    engine = Engine()
    monkeypatch.setattr(zero, "clear_kept_gradients", lambda optimizer: engine.asked.append("clear"))
    return engine, ZeroOptimizer(engine, State(engine), lambda: None)  # type: ignore[arg-type]


def test_a_step_takes_the_sum_over_the_ranks_and_its_rate(made: tuple[Engine, ZeroOptimizer]) -> None:
    engine, optimizer = made
    optimizer.backward(torch.tensor(1.5))
    optimizer.backward(torch.tensor(2.0), last=True)
    outcome = optimizer.step(0.25)
    assert (outcome.gradient_norm, outcome.applied, outcome.loss_scale) == (2.5, True, None)
    assert engine.asked == [
        ("backward", 6.0, False, "0"),
        ("backward", 8.0, False, "0"),
        ("step", [0.25, 0.125], "0"),
        "clear",
        "average",
    ]
    for rate in (-0.1, float("inf"), float("nan")):
        with pytest.raises(AssertionError):
            optimizer.step(rate)
    optimizer.backward(torch.tensor(1.0))
    optimizer.step(0.0)


def test_a_refused_step_moves_no_average(made: tuple[Engine, ZeroOptimizer]) -> None:
    engine, optimizer = made
    engine.applied = False
    optimizer.backward(torch.tensor(1.0))
    assert not optimizer.step(0.1).applied
    assert engine.asked[-1] == "clear"


def test_the_first_step_that_was_applied_looks_for_the_state_in_host_memory(
    made: tuple[Engine, ZeroOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, without = made
    looked: list[Any] = []
    monkeypatch.setattr(zero, "require_on_host", lambda tensors, setting: looked.append((tensors, setting)))
    offloaded = ZeroOptimizer(engine, State(engine), lambda: None, offload=True)  # type: ignore[arg-type]
    for optimizer, applied in ((without, True), (offloaded, False), (offloaded, True), (offloaded, True)):
        engine.applied = applied
        optimizer.backward(torch.tensor(1.0))
        optimizer.step(0.1)
    assert looked == [(("tensors",), "adam_offload")]


def test_a_step_without_a_micro_batch_is_set_up_as_a_backward_pass_would(made: tuple[Engine, ZeroOptimizer]) -> None:
    engine, optimizer = made
    optimizer.step(0.1)
    assert engine.asked[:4] == [("boundary", False), "buckets", "epilogue", ("step", [0.1, 0.05], "0")]
    engine.asked.clear()
    optimizer.backward(torch.tensor(1.0))
    optimizer.step(0.1)
    assert ("boundary", False) not in engine.asked
    engine.asked.clear()
    engine.partitions = False
    del engine.optimizer.setup_buckets
    optimizer.step(0.1)
    assert engine.asked[:2] == [("boundary", False), ("step", [0.1, 0.05], "0")]


def test_the_state_is_asked_under_the_same_names(made: tuple[Engine, ZeroOptimizer]) -> None:
    _, optimizer = made
    found: list[Any] = [
        optimizer.state_tensors(),
        optimizer.checkpoint_tensors(),
        optimizer.shard_requests(),
    ]
    assert found == [("tensors",), ("shards",), ("shard_requests",)]
    written: list[Any] = []
    state: Any = SimpleNamespace(
        load_tensors=lambda tensors: written.append(("tensors", tensors)),
        write=lambda *parts: written.append(parts),
        load=lambda read: written.append(("read", read)),
    )
    optimizer.state = state
    optimizer.load_state_tensors({})
    tensor = torch.zeros(1)
    optimizer.write("w", (0,), tensor)
    optimizer.load_state(None)  # type: ignore[arg-type]
    assert written == [("tensors", {}), ("w", (0,), tensor), ("read", None)]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.outside = nn.Linear(2, 1)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.to(dtype)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of DeepSpeed and of what wraps it."""
    noted: dict[str, Any] = {"external": [], "gathered": []}

    @contextmanager
    def gathered(parameters: list[Any]) -> Any:
        noted["gathered"].append((len(parameters), os.environ.get("LOCAL_RANK")))
        yield

    package = SimpleNamespace(
        zero=SimpleNamespace(
            register_external_parameter=lambda module, parameter: noted["external"].append((module, parameter)),
            GatheredParameters=gathered,
        ),
        noted=noted,
    )
    monkeypatch.setattr(zero, "load_deepspeed", lambda device: package)
    monkeypatch.setattr(zero, "verify_float16", lambda package: noted.update(float16=True))

    def start(deepspeed: Any, root: Any, adamw: Any, config: Any, device: Any) -> Engine:
        noted.update(root=root, adamw=adamw, config=config, device=device)
        noted["engine"] = Engine(root, adamw)
        return noted["engine"]

    monkeypatch.setattr(zero, "start_engine", start)
    kept = {"ZeroWeights": "weights", "ZeroState": "state"}
    for name, word in kept.items():
        monkeypatch.setattr(
            zero, name, lambda model, optimizer, ranks, word=word, **options: noted.update({word: options}) or word
        )
    return package


ADAM = {"betas": (0.8, 0.9), "epsilon": 1e-7, "weight_decay": 0.3, "max_norm": 0.5}


def spread(model: Model, stage: int = 3, **options: Any) -> ZeroModel:
    return ZeroModel(model, list(model.layers), SingleProcess(), device=CPU, stage=stage, **ADAM, **options)


def test_matrices_decay_and_vectors_do_not(package: Any) -> None:
    model = Model()
    spread(model, ema_decay=0.5)
    decayed, others = package.noted["adamw"].param_groups
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.ndim == 2}
    assert {id(p) for p in others["params"]} == {id(p) for p in model.parameters() if p.ndim == 1 and p.requires_grad}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert (decayed["betas"], decayed["eps"], decayed["lr"], decayed["fused"]) == ((0.8, 0.9), 1e-7, 0.0, True)
    assert package.noted["state"] == {"ema_decay": 0.5, "first_rows": None}
    assert package.noted["config"]["gradient_clipping"] == 0.5
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert package.noted["config"]["zero_optimization"]["reduce_bucket_size"] == 1024 * -(-numel // 1024)
    only = nn.Module()
    only.gain = nn.Parameter(torch.ones(2))
    ZeroModel(only, [], SingleProcess(), device=CPU, stage=1, **ADAM)  # type: ignore[arg-type]
    [group] = package.noted["adamw"].param_groups
    assert group["weight_decay"] == 0.0


def test_options_reach_the_configuration(package: Any) -> None:
    spread(Model(), cpu_offload=True, overlap_comm=True, persistent_numel=5, initial_scale_power=3)
    config = package.noted["config"]
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["overlap_comm"]
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 5
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 1
    assert config["fp16"]["initial_scale_power"] == 3
    assert "offload_optimizer" in config["zero_optimization"]
    assert "float16" not in package.noted
    spread(Model(torch.float16))
    assert package.noted["float16"]
    with pytest.raises(OptionsError):
        spread(Model(), hpz_size=2)


def test_a_model_without_a_trained_weight_is_refused(package: Any) -> None:
    with pytest.raises(OptionsError):
        spread(Model().requires_grad_(False))  # type: ignore[arg-type]


def test_weights_outside_of_the_layers_are_gathered_for_the_whole_of_a_use(package: Any) -> None:
    model = Model()
    readers = [(model.layers[0], [model.outside.weight])]
    spread(model, readers=readers)
    outside = {id(model.outside.weight), id(model.outside.bias), id(model.frozen)}
    of_root = {id(p) for module, p in package.noted["external"] if module is package.noted["root"]}
    assert of_root == outside
    assert (model.layers[0], model.outside.weight) in [
        (module, p) for module, p in package.noted["external"] if module is not package.noted["root"]
    ]
    package.noted["external"].clear()
    spread(Model(), stage=2, readers=readers)
    assert package.noted["external"] == []


def test_a_use_goes_through_the_engine(package: Any) -> None:
    made = spread(Model())
    assert made.compute(lambda a, *, b: a + b, 2, b=3) == 5
    assert package.noted["engine"].asked == [("forward", "0")]
    made.close()
    assert package.noted["engine"].asked[-1] == "destroy"


def test_whole_weights_are_gathered_one_at_a_time_where_they_are_spread(package: Any) -> None:
    for stage in (2, 3):
        package.noted["gathered"].clear()
        model = Model()
        made = spread(model, stage=stage)
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, _ in made.full_tensors()] == names
        trained = dict(made.full_tensors(trained=True))
        assert set(trained) == set(names) - {"frozen"}
        assert torch.equal(trained["outside.weight"], model.outside.weight)
        assert not trained["outside.weight"].requires_grad
        shares = trained["outside.weight"].data_ptr() == model.outside.weight.data_ptr()
        assert shares == (stage == 2)
        assert package.noted["gathered"] == ([] if stage == 2 else [(1, "0")] * (2 * len(names) - 1))


def test_shards_of_one_weight_are_one_flat_tensor(package: Any) -> None:
    made = spread(Model())
    shards = [Shard("w", (3, 2), (0, 0), torch.ones(1, 2)), Shard("v", (1,), (0,), torch.zeros(1))]
    shards.append(Shard("w", (3, 2), (1, 0), torch.full((2, 2), 2.0)))
    made.weights = SimpleNamespace(shards=lambda: shards)  # type: ignore[assignment]
    assert made.checkpoint_tensors() is shards
    assert [name for name, _ in made.local_shards()] == ["w", "v", "w"]
    found = made.state_tensors()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "w": [1.0, 1.0, 2.0, 2.0, 2.0, 2.0],
        "v": [0.0],
    }
