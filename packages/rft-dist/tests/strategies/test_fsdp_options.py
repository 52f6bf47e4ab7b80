"""What torch is asked for when weights are sharded: the mesh, the types, the memory and the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.shards import ShardRequest
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.strategies import fsdp
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.testing.thread_ranks import run_in_threads

CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.0, "max_norm": 0.0}


class Model(nn.Module):
    """Two layers, a weight of its own and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(2))
        self.own = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("positions", torch.arange(3.0))


def of_size(world_size: int) -> SingleProcess:
    ranks = SingleProcess()
    ranks.world_size = world_size  # type: ignore[misc]
    return ranks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every call to torch, in order."""
    calls: list[tuple[Any, ...]] = []

    def mesh(device_type: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> str:
        calls.append(("mesh", device_type, shape, mesh_dim_names))
        return "mesh"

    monkeypatch.setattr(fsdp, "init_single_process_group", lambda device: calls.append(("group of one", device)))
    monkeypatch.setattr(fsdp, "init_device_mesh", mesh)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: calls.append(("shard", module, options)))
    return calls


@pytest.mark.parametrize(
    ("world_size", "shard_size", "calls"),
    [
        (1, None, [("group of one", CPU), ("mesh", "cpu", (1,), ("shard",))]),
        (2, None, [("mesh", "cpu", (2,), ("shard",))]),
        (4, 4, [("mesh", "cpu", (4,), ("shard",))]),
        (8, 2, [("mesh", "cpu", (4, 2), ("replicate", "shard"))]),
        (2, 1, [("mesh", "cpu", (2, 1), ("replicate", "shard"))]),
    ],
)
def test_weights_are_spread_over_all_ranks_or_groups_of_them(
    asked: list[tuple[Any, ...]], world_size: int, shard_size: int | None, calls: list[Any]
) -> None:
    FullyShardedModel(Model(), [], of_size(world_size), device=CPU, shard_size=shard_size)
    assert asked[:-1] == calls


@pytest.mark.parametrize(("shard_size", "nearest"), [(0, 1), (-2, 1), (4, 3), (5, 6), (12, 6)])
def test_a_group_that_does_not_divide_the_ranks_is_refused_with_the_nearest_that_does(
    asked: list[tuple[Any, ...]], shard_size: int, nearest: int
) -> None:
    with pytest.raises(OptionsError) as caught:
        FullyShardedModel(Model(), [], of_size(6), device=CPU, shard_size=shard_size)
    assert caught.value.problem.code == "fsdp.shard_size"
    assert caught.value.problem.do == f"--shard_size {nearest}"
    assert caught.value.problem.why.endswith("allowed: 1, 2, 3, 6")


PLAIN = {
    "mesh": "mesh",
    "reshard_after_forward": True,
    "mp_policy": MixedPrecisionPolicy(),
    "offload_policy": OffloadPolicy(),
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("cpu", {}, {}),
        ("cpu", {"mesh": "another"}, {"mesh": "another"}),
        ("cpu", {"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ("cpu", {"compute_dtype": torch.bfloat16}, {"mp_policy": NARROW}),
        ("cpu", {"cpu_offload": True}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ("cuda", {"cpu_offload": True}, {"offload_policy": CPUOffloadPolicy(pin_memory=True)}),
    ],
)
def test_layers_are_sharded_before_the_model_and_with_the_same_options(
    asked: list[tuple[Any, ...]], device: str, options: dict[str, Any], words: dict[str, Any]
) -> None:
    model = Model()
    sharded = FullyShardedModel(model, list(model.layers), of_size(2), device=torch.device(device), **options)
    sharding = [call for call in asked if call[0] == "shard"]
    assert [module for _, module, _ in sharding] == [*model.layers, model]
    assert [given for _, _, given in sharding] == [PLAIN | words] * 3
    assert [type(given["offload_policy"]) for _, _, given in sharding] == [type((PLAIN | words)["offload_policy"])] * 3
    assert sharded.compute(lambda one, two: one - two, 5, two=3) == 2


def test_blocks_are_read_into_a_model_without_memory_whose_buffers_stay() -> None:
    full = torch.arange(6.0).view(3, 2)

    def work(ranks: TorchCollectives) -> None:
        model = Model()
        sharded = FullyShardedModel(model, list(model.layers), ranks, device=CPU)
        read: list[str] = []

        def block(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            read.append(name)
            return full[start[0] : start[0] + shape[0]].double()

        sharded.load_shards(block, CPU)
        names = [] if ranks.rank == 3 else [name for name, _ in model.named_parameters()]
        assert read == names, "a rank that holds nothing reads nothing"
        assert all(torch.equal(tensor, full) for _, tensor in sharded.full_tensors())
        assert model.get_buffer("positions").tolist() == [0.0, 1.0, 2.0]

    run_in_threads(4, work)


def test_the_shards_of_all_ranks_are_the_state_once_and_optional_ones_are_asked_for_first() -> None:
    def work(ranks: TorchCollectives) -> list[tuple[str, tuple[int, ...], list[Any]]]:
        model = Model()
        FullyShardedModel(model, list(model.layers), ranks, device=CPU)
        named = [("w", model.own)]
        scaler = LossScaler(scale=4.0)
        optimizer = ShardedOptimizer(named, ranks, **ADAM, ema_decay=0.5, scaler=scaler)
        shape, start = ((2, 2), (0, 0)) if ranks.rank == 0 else ((1, 2), (2, 0))
        assert optimizer.shard_requests() == [
            ShardRequest("loss_scale", (3,), torch.float64, (0,), (3,)),
            ShardRequest("ema/w", (3, 2), torch.float32, start, shape),
            ShardRequest("exp_avg/w", (3, 2), torch.float32, start, shape),
            ShardRequest("exp_avg_sq/w", (3, 2), torch.float32, start, shape),
            ShardRequest("step/w", (), torch.float32, (), ()),
        ]
        arrived = {
            request.name: torch.full(request.shape, 3.0, dtype=request.dtype) for request in optimizer.shard_requests()
        }
        arrived["loss_scale"] = torch.tensor([8.0, 1.0, 2.0], dtype=torch.float64)
        for request in optimizer.shard_requests()[:-1]:
            optimizer.write(request.name, request.start, arrived[request.name])
        assert scaler.scale == 4.0, "nothing is loaded before the last required one has come"
        optimizer.write("step/w", (), arrived["step/w"])
        assert (scaler.scale, scaler.clean_steps, scaler.skipped) == (8.0, 1, 2)
        assert all(torch.equal(tensor, arrived[name]) for name, tensor in optimizer.state_tensors().items())
        return [(each.name, each.start, each.data.tolist()) for each in optimizer.checkpoint_tensors()]

    first, second = run_in_threads(2, work)
    row = [3.0, 3.0]
    assert first == [
        *[("exp_avg/w", (0, 0), [row, row]), ("exp_avg_sq/w", (0, 0), [row, row]), ("step/w", (), 3.0)],
        *[("ema/w", (0, 0), [row, row]), ("loss_scale", (0,), [8.0, 1.0, 2.0])],
    ]
    assert second == [(name, (2, 0), [row]) for name in ("exp_avg/w", "exp_avg_sq/w", "ema/w")]
