"""Averages in the place of weights that are kept as ranges of flattened tensors, over ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_dist.checkpoint_format.shards import Shard
from rft_dist.collectives import TorchCollectives
from rft_dist.strategies.ema_swap import averages_of, swap_in_ema, swap_in_ema_zero
from rft_dist.testing.thread_ranks import run_in_threads

SHAPES = {"a": (2, 3), "b": (4,)}


class Store:
    """Whole tensors by name, of which this rank gives some blocks; everything that is written is noted."""

    def __init__(self, tensors: dict[str, Tensor], given: Sequence[Shard] = ()) -> None:
        self.tensors, self.given = tensors, list(given)
        self.written: list[tuple[str, tuple[int, ...], list[Any]]] = []

    def shards(self) -> list[Shard]:
        return self.given

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        self.written.append((name, start, tensor.tolist()))
        box = tuple(slice(first, first + size) for first, size in zip(start, tensor.shape, strict=True))
        self.tensors[name][box] = tensor


def made(rank: int) -> tuple[dict[str, nn.Parameter], Store, Store]:
    """Two ranks with a row of a and half of b each."""
    parameters = {name: nn.Parameter(torch.full(shape, 1.0)) for name, shape in SHAPES.items()}
    weights = Store({name: parameter.detach() for name, parameter in parameters.items()})
    blocks = {"a": ((rank, 0), (1, 3)), "b": ((2 * rank,), (2,))}
    state = {f"{kind}/{name}": torch.full(shape, 7.0) for kind in ("master", "ema") for name, shape in SHAPES.items()}
    given: list[Shard] = []
    for kind, value in (("master", 2.0), ("exp_avg", 9.0), ("ema", 3.0)):
        for number, (name, (start, shape)) in enumerate(blocks.items()):
            given.append(Shard(f"{kind}/{name}", SHAPES[name], start, torch.full(shape, value + rank + 10 * number)))
    return parameters, weights, Store(state, given)


def test_every_rank_sees_the_averages_of_all_and_afterwards_its_own_bits_are_back() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        parameters, weights, state = made(ranks.rank)
        with swap_in_ema_zero(parameters, weights, state, ranks):
            seen = {name: parameter.tolist() for name, parameter in parameters.items()}
            assert [name for name, _, _ in weights.written] == ["a", "b"]
            assert state.written == []
            for each in state.given:
                each.data.zero_()
        after = {name: parameter.tolist() for name, parameter in parameters.items()}
        return [seen, after, state.written]

    found = run_in_threads(2, work)
    for rank, (seen, after, written) in enumerate(found):
        assert seen == {"a": [[3.0] * 3, [4.0] * 3], "b": [13.0, 13.0, 14.0, 14.0]}
        assert after == {"a": [[1.0] * 3] * 2, "b": [1.0] * 4}
        assert written == [
            ("master/a", (rank, 0), [[2.0 + rank] * 3]),
            ("master/b", (2 * rank,), [12.0 + rank] * 2),
        ]


def test_an_error_meanwhile_puts_everything_back() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        parameters, weights, state = made(ranks.rank)
        with pytest.raises(RuntimeError), swap_in_ema_zero(parameters, weights, state, ranks):
            raise RuntimeError("broken")
        return [bool((parameters["a"] == 1.0).all()), len(state.written)]

    assert run_in_threads(2, work) == [[True, 2]] * 2


def test_of_a_weight_that_is_spread_the_range_of_this_rank_is_kept() -> None:
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_shape, parameter.ds_numel = torch.Size((2, 3)), 6
    parameter.ds_tensor = torch.arange(4.0)
    parameter.ds_tensor.ds_numel = 4
    weights = Store({"w": torch.zeros(2, 3)})
    given = [Shard("ema/w", (2, 3), (0, 0), torch.full((2, 3), 5.0))]

    def work(ranks: TorchCollectives) -> None:
        with swap_in_ema_zero({"w": parameter}, weights, Store({}, given), ranks):
            parameter.ds_tensor.fill_(8.0)

    run_in_threads(1, work)
    first, *back = weights.written
    assert first == ("w", (0, 0), [[5.0] * 3] * 2)
    assert back == [("w", (0, 0), [[0.0, 1.0, 2.0]]), ("w", (1, 0), [[3.0]])]


def test_averages_go_by_the_names_of_their_parameters() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert averages_of({"ema/a": one, "exp_avg/a": two, "ema/b/ema/c": two}) == {"a": one, "b/ema/c": two}


def test_parameters_without_an_average_are_left() -> None:
    kept, averaged = torch.ones(2), torch.ones(2)
    with swap_in_ema({"a": averaged, "b": kept}, lambda: {"ema/a": torch.full((2,), 4.0), "step/b": torch.zeros(2)}):
        assert averaged.tolist() == [4.0, 4.0]
        assert kept.tolist() == [1.0, 1.0]
    assert averaged.tolist() == [1.0, 1.0]
