"""Weights and moments under ZeRO as blocks, on objects that are laid out as DeepSpeed's, without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.strategies.zero.state import ZeroState, ZeroWeights

SHAPES = {"a": (2, 3), "b": (4,), "c": (3, 2)}
"""a and c are stepped on as one tensor, b as another."""


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            values = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * (number + 1)
            setattr(self, name, nn.Parameter(values.to(dtype)))
        self.frozen = nn.Parameter(torch.full((2,), 9.0, dtype=dtype), requires_grad=False)
        self.other = nn.Parameter(torch.full((5,), 8.0, dtype=dtype), requires_grad=False)


def ranks(rank: int = 0, world_size: int = 2) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size)


RANGES = {
    0: {"a": (0, 0, 0, 4), "b": (1, 0, 0, 1)},
    1: {"a": (0, 0, 4, 2), "c": (0, 2, 0, 6), "b": (1, 0, 1, 3)},
}
"""Per rank and parameter: group, where it begins in the flat tensor and in the parameter, elements."""


def stage_1(model: Model, rank: int, scaler: Any = None) -> Any:
    """Two ranks with a part of each flat tensor."""
    sizes = [0, 0]
    for group, place, _, numel in RANGES[rank].values():
        sizes[group] = max(sizes[group], place + numel)
    flats = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for name, (group, place, offset, numel) in RANGES[rank].items():
        parameter: Any = getattr(model, name)
        flats[group].detach()[place : place + numel] = parameter.detach().reshape(-1)[offset : offset + numel]
        parameter._hp_mapping = SimpleNamespace(
            param_group_index=group,
            hp_fragment_address=SimpleNamespace(start=place, numel=numel),
            lp_fragment_address=SimpleNamespace(start=offset, numel=numel),
        )
    inner = torch.optim.AdamW([{"params": [flat]} for flat in flats], lr=0.1)
    return SimpleNamespace(optimizer=inner, loss_scaler=scaler)


def made(rank: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, ZeroWeights, ZeroState, Any]:
    model = Model(dtype)
    optimizer = stage_1(model, rank, options.pop("scaler", None))
    weights = ZeroWeights(model, optimizer, ranks(rank))
    return model, weights, ZeroState(model, optimizer, ranks(rank), **options), optimizer


def put_together(shards: list[Shard]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for shard in shards:
        full = whole.setdefault(shard.name, torch.full(shard.global_shape, float("nan")))
        box = tuple(slice(first, first + size) for first, size in zip(shard.start, shard.data.shape, strict=True))
        assert bool(full[box].isnan().all()), f"{shard.name} is given twice"
        full[box] = shard.data.float()
    return whole


def test_the_ranks_give_every_weight_once_and_share_the_frozen_ones() -> None:
    both = [made(rank) for rank in (0, 1)]
    shards = [shard for _, weights, _, _ in both for shard in weights.shards()]
    whole = put_together(shards)
    model = Model()
    assert set(whole) == {"a", "b", "c", "frozen", "other"}
    assert all(torch.equal(whole[name], parameter) for name, parameter in model.named_parameters())
    frozen = [{s.name for s in weights.shards()} & {"frozen", "other"} for _, weights, _, _ in both]
    assert sorted(map(len, frozen)) == [1, 1]
    assert all(weights.num_local() == 6 + 4 + 6 + 2 + 5 for _, weights, _, _ in both)


def test_every_rank_asks_for_all_weights_that_it_keeps_in_their_type() -> None:
    _, weights, _, _ = made(1, torch.bfloat16)
    asked: dict[str, int] = {}
    for request in weights.shard_requests():
        asked[request.name] = asked.get(request.name, 0) + torch.Size(request.shape).numel()
        assert request.dtype == torch.bfloat16
    assert asked == {"a": 6, "b": 4, "c": 6, "frozen": 2, "other": 5}


def test_a_block_goes_into_the_weights_and_into_the_copy_that_is_stepped_on() -> None:
    model, weights, _, optimizer = made(1)
    weights.write("a", (1, 0), torch.tensor([[1.0, 2.0, 3.0]]))
    assert model.a.tolist() == [[100.0, 101.0, 102.0], [1.0, 2.0, 3.0]]
    flat = optimizer.optimizer.param_groups[0]["params"][0]
    assert flat.tolist()[:2] == [2.0, 3.0], "this rank steps on the last two of a"
    assert flat.tolist()[2:] == [300.0, 301.0, 302.0, 303.0, 304.0, 305.0]
    weights.write("frozen", (0,), torch.tensor([5.0, 6.0]))
    assert model.frozen.tolist() == [5.0, 6.0]
    weights.write("a", (0, 0), torch.tensor([[7.0, 8.0, 9.0]]))
    assert flat.tolist()[:2] == [2.0, 3.0]


def test_whole_weights_are_taken_one_by_one() -> None:
    model, weights, _, _ = made(0)
    given = {name: torch.full(tuple(parameter.shape), 3.0) for name, parameter in model.named_parameters()}
    weights.load(lambda name: given[name])
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())
    given["b"] = torch.zeros(5)
    with pytest.raises(AssertionError):
        weights.load(lambda name: given[name])


def test_weights_that_are_spread_are_given_and_asked_for_by_their_range_and_gathered_anew() -> None:
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_shape, parameter.ds_numel = torch.Size((2, 3)), 6
    parameter.ds_tensor = torch.arange(4.0)
    parameter.ds_tensor.ds_numel = 4
    forgotten: list[str] = []
    parameter.partition = lambda: forgotten.append("partition")
    parameter.ds_secondary_tensor = torch.zeros(1)
    model: Any = SimpleNamespace(named_parameters=lambda: [("w", parameter)])
    flat = torch.zeros(4)
    optimizer = SimpleNamespace(
        fp32_partitioned_groups_flat=[flat], grad_position={0: (0, 0, 4)}, get_param_id=lambda parameter: 0
    )
    weights = ZeroWeights(model, optimizer, ranks(1))
    assert weights.num_local() == 2
    assert [(s.start, s.data.tolist()) for s in weights.shards()] == [((1, 1), [[0.0, 1.0]])]
    assert [(r.start, r.shape) for r in weights.shard_requests()] == [((1, 1), (1, 2))]
    weights.write("w", (1, 0), torch.tensor([[5.0, 6.0, 7.0]]))
    assert parameter.ds_tensor.tolist() == [6.0, 7.0, 2.0, 3.0]
    assert flat.tolist() == [6.0, 7.0, 0.0, 0.0]
    assert forgotten == ["partition"]
    assert parameter.ds_secondary_tensor is None


def test_the_ranges_of_a_rank_are_live_and_go_by_the_names_of_their_parameters() -> None:
    _, _, state, optimizer = made(1)
    tensors = state.tensors()
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert set(tensors) == {f"{kind}/{name}" for kind in kinds for name in ("a", "b", "c")}
    flat = optimizer.optimizer.param_groups[0]["params"][0]
    optimizer.optimizer.state[flat]["exp_avg"].copy_(torch.arange(8.0))
    assert tensors["exp_avg/a"].tolist() == [0.0, 1.0]
    assert tensors["exp_avg/c"].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_narrow_weights_have_float32_copies_beside_their_moments() -> None:
    _, _, state, optimizer = made(0, torch.bfloat16)
    tensors = state.tensors()
    assert tensors["master/a"].tolist() == [100.0, 101.0, 102.0, 103.0]
    assert tensors["master/a"].dtype == torch.float32
    flat = optimizer.optimizer.param_groups[0]["params"][0]
    flat.detach().zero_()
    assert tensors["master/a"].tolist() == [0.0] * 4


def changed(state: ZeroState, seed: int) -> None:
    """Draw a state; counts of steps are 3."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.tensors().items():
        tensor.copy_(torch.tensor(3.0) if name.startswith("step/") else torch.randn(tensor.shape, generator=generator))


def test_what_a_rank_gave_is_put_back_to_the_bit_or_refused() -> None:
    _, _, state, _ = made(1, ema_decay=0.5)
    changed(state, 1)
    kept = {name: tensor.clone() for name, tensor in state.tensors().items()}
    _, _, other, _ = made(1, ema_decay=0.5)
    other.load_tensors(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in other.tensors().items())
    _, _, fresh, _ = made(1, ema_decay=0.5)
    before = {name: tensor.clone() for name, tensor in fresh.tensors().items()}
    with pytest.raises(CheckpointError):
        fresh.load_tensors({name: tensor for name, tensor in kept.items() if name != "exp_avg/a"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_all_ranks_cover_the_state_once_and_any_ranks_take_them_up(dtype: torch.dtype) -> None:
    states = [made(rank, dtype, ema_decay=0.5)[2] for rank in (0, 1)]
    for rank, state in enumerate(states):
        changed(state, rank)
    whole = put_together([shard for state in states for shard in state.shards()])
    kinds = {"exp_avg", "exp_avg_sq", "step", "ema"} | ({"master"} if dtype == torch.bfloat16 else set())
    assert set(whole) == {f"{kind}/{name}" for kind in kinds for name in SHAPES}
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values())
    assert all(tuple(whole[f"exp_avg/{name}"].shape) == shape for name, shape in SHAPES.items())
    for rank in (0, 1):
        again = made(rank, dtype, ema_decay=0.5)[2]
        requests = again.shard_requests()
        assert {r.name for r in requests if r.name.startswith("step/")} == {"step/a", "step/b", "step/c"}
        for request in requests:
            assert request.dtype == torch.float32
            assert tuple(request.global_shape) == tuple(whole[request.name].shape)
            places = zip(request.start, request.shape, strict=True)
            box = tuple(slice(first, first + size) for first, size in places)
            again.write(request.name, request.start, whole[request.name][box])
        mine = states[rank].tensors()
        assert all(torch.equal(tensor, mine[name]) for name, tensor in again.tensors().items())
        loaded = made(rank, dtype, ema_decay=0.5)[2]
        loaded.load(whole.get)
        assert all(torch.equal(tensor, mine[name]) for name, tensor in loaded.tensors().items())


def test_a_state_without_copies_leaves_those_that_the_weights_made() -> None:
    _, _, state, _ = made(0, torch.bfloat16)
    whole = {
        f"{kind}/{name}": torch.ones(shape) for kind in ("exp_avg", "exp_avg_sq") for name, shape in SHAPES.items()
    }
    whole |= {f"step/{name}": torch.tensor(2.0) for name in SHAPES}
    state.load(whole.get)
    assert state.tensors()["master/a"].tolist() == [100.0, 101.0, 102.0, 103.0]
    assert state.tensors()["exp_avg/a"].tolist() == [1.0] * 4
    for change in ({"exp_avg/b": None}, {"exp_avg/b": torch.ones(5)}, {"step/c": torch.ones(1)}):
        with pytest.raises(CheckpointError) as caught:
            state.load((whole | change).get)
        assert caught.value.problem.code == "optimizer.state_differs"


def test_parameters_that_are_stepped_together_have_taken_as_many_steps() -> None:
    state = made(0)[2]
    state.shard_requests()
    state.write("step/a", (), torch.tensor(3.0))
    state.write("step/b", (), torch.tensor(5.0))
    with pytest.raises(CheckpointError) as caught:
        state.write("step/c", (), torch.tensor(4.0))
    assert caught.value.problem.code == "zero.steps_differ"
    state.shard_requests()
    state.write("step/c", (), torch.tensor(4.0))
    assert state.tensors()["step/a"].item() == 3.0, "of c this rank holds nothing"
    assert state.tensors()["step/b"].item() == 5.0


def test_averages_begin_at_what_is_stepped_on_and_follow_it() -> None:
    _, _, state, optimizer = made(0, ema_decay=0.75)
    assert state.tensors()["ema/a"].tolist() == [100.0, 101.0, 102.0, 103.0]
    optimizer.optimizer.param_groups[0]["params"][0].detach().zero_()
    assert state.tensors()["ema/a"].tolist() == [100.0, 101.0, 102.0, 103.0]
    state.average()
    assert state.tensors()["ema/a"].tolist() == [75.0, 75.75, 76.5, 77.25]
    _, _, without, _ = made(0)
    without.average()
    assert "ema/a" not in without.tensors()


def scaler() -> Any:
    return SimpleNamespace(cur_scale=1024.0, cur_iter=5, last_overflow_iter=2, cur_hysteresis=1)


def test_a_scale_of_float16_is_part_of_the_state_of_the_first_rank() -> None:
    _, _, state, _ = made(0, torch.float16, scaler=scaler())
    assert state.tensors()["loss_scale"].tolist() == [1024.0, 5.0, 2.0, 1.0]
    assert state.tensors()["loss_scale"].dtype == torch.float64
    assert "loss_scale" in {shard.name for shard in state.shards()}
    second = made(1, torch.float16, scaler=scaler())[2]
    assert "loss_scale" not in {shard.name for shard in second.shards()}
    [request] = [request for request in second.shard_requests() if request.name == "loss_scale"]
    assert (request.global_shape, request.dtype, request.start, request.shape) == ((4,), torch.float64, (0,), (4,))
    for take in ("write", "load_tensors", "load"):
        other = scaler()
        _, _, taken, _ = made(0, torch.float16, scaler=other)
        values = torch.tensor([64.5, 7.0, 6.0, 2.0], dtype=torch.float64)
        if take == "write":
            taken.write("loss_scale", (0,), values)
        elif take == "load_tensors":
            taken.load_tensors(taken.tensors() | {"loss_scale": values})
        else:
            whole = {f"{k}/{n}": torch.ones(s) for k in ("exp_avg", "exp_avg_sq") for n, s in SHAPES.items()}
            steps = {f"step/{name}": torch.tensor(1.0) for name in SHAPES}
            taken.load((whole | steps | {"loss_scale": values}).get)
        found = [other.cur_scale, other.cur_iter, other.last_overflow_iter, other.cur_hysteresis]
        assert found == [64.5, 7, 6, 2]
        assert [type(value) for value in found] == [float, int, int, int]
    assert "loss_scale" not in made(0, torch.bfloat16, scaler=scaler())[2].tensors()


def test_of_a_matrix_whose_last_rows_are_trained_the_state_is_that_of_these_rows() -> None:
    first = {"a": 1, "c": 2}
    states = [made(rank, first_rows=first)[2] for rank in (0, 1)]
    for rank, state in enumerate(states):
        changed(state, rank)
    whole = put_together([shard for state in states for shard in state.shards()])
    shapes = {"a[1:]": (1, 3), "b": (4,), "c[2:]": (1, 2)}
    assert set(whole) == {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in shapes}
    assert all(tuple(whole[f"exp_avg/{name}"].shape) == shape for name, shape in shapes.items())
    for rank in (0, 1):
        loaded = made(rank, first_rows=first)[2]
        loaded.load(whole.get)
        mine = states[rank].tensors()
        assert all(torch.equal(tensor, mine[name]) for name, tensor in loaded.tensors().items())
        assert {request.name for request in loaded.shard_requests()} <= set(whole)


def test_only_what_belongs_to_the_state_decays_and_only_where_it_is_stepped_on() -> None:
    model, _, state, optimizer = made(1, first_rows={"a": 1, "c": 2})
    decay, (first, second) = state.decay(ParameterGroups(), 0.5), optimizer.optimizer.param_groups
    before = [group["params"][0].tolist() for group in (first, second)]
    optimizer.optimizer.param_groups = [first]
    decay(optimizer.optimizer, (), {})
    after = [group["params"][0].tolist() for group in (first, second)]
    # of a this rank has the last two elements, which are trained, of c the last two of six
    factors = [0.95, 0.95, 1.0, 1.0, 1.0, 1.0, 0.95, 0.95]
    assert after[0] == pytest.approx([value * factor for value, factor in zip(before[0], factors, strict=True)])
    assert after[0][2:6] == before[0][2:6]
    assert after[1] == before[1], "DeepSpeed steps on it by itself"
    assert model.c.flatten().tolist() == before[0][2:], "the weights follow after the step"
