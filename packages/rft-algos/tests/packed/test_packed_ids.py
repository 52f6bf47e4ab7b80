from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.input_checks import InputError
from rft_algos.losses.aggregation import sequence_mean_token_mean
from rft_algos.losses.off_policy import off_policy_sequence_mask
from rft_algos.objectives import RolloutBatch, compute_advantages
from rft_algos.packed import packed_ids, reverse_scan, segments
from rft_algos.packed.packed_ids import known_runs, packed_segment_ids
from rft_algos.rewards.kl_penalty import token_rewards


def lengths_of(seed: int) -> Tensor:
    """Sequences without tokens among short and long ones; every third batch has long ones alone."""
    numbers = random.Random(seed)
    among = [128, 160, 193, 301] if seed % 3 == 2 else [0, 1, 2, 5, 33, 200]
    return torch.tensor([numbers.choice(among) for _ in range(numbers.randint(1, 9))])


def test_ids_are_those_of_sequences_one_after_another() -> None:
    ids_T = packed_segment_ids(torch.tensor([2, 0, 1]))
    assert (ids_T.tolist(), ids_T.dtype) == ([0, 0, 2], torch.int64)
    runs = known_runs(ids_T)
    assert runs is not None
    assert (runs.ids_R.tolist(), runs.lengths_R.tolist()) == ([0, 2], [2, 1])
    assert packed_segment_ids(torch.tensor([1, 2], dtype=torch.int32)).tolist() == [0, 1, 1]
    assert packed_segment_ids(torch.tensor([], dtype=torch.int64)).shape == (0,)


def test_lengths_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"lengths_N must be integers, they are torch\.float32"):
        packed_segment_ids(torch.tensor([1.0]))
    with pytest.raises(InputError, match=r"every argument must have one shape \[T\]"):
        packed_segment_ids(torch.tensor([[1]]))
    with pytest.raises(InputError, match="lengths_N must be 0 or more, the least is -2"):
        packed_segment_ids(torch.tensor([3, -2]))


def test_only_the_tensor_that_was_made_is_known_and_only_as_it_was() -> None:
    ids_T = packed_segment_ids(torch.tensor([2, 1]))
    for other_T in (ids_T.clone(), ids_T[:], ids_T.detach(), torch.tensor([0, 0, 1])):
        assert known_runs(other_T) is None
    assert known_runs(ids_T) is not None
    ids_T[1] = 1
    assert known_runs(ids_T) is None
    assert segments.segment_counts(
        segments.segment_index(torch.ones(3, dtype=torch.bool), ids_T), dtype=torch.float64
    ).tolist() == [1.0, 2.0, 0.0]
    viewed_T = packed_segment_ids(torch.tensor([2, 1]))
    viewed_T[1:].fill_(-1)
    assert known_runs(viewed_T) is None
    with torch.inference_mode():
        assert known_runs(packed_segment_ids(torch.tensor([2, 1]))) is None


def test_runs_are_forgotten_with_their_tensor() -> None:
    before = len(packed_ids._known)
    ids_T = packed_segment_ids(torch.tensor([2, 1]))
    assert len(packed_ids._known) == before + 1
    del ids_T
    gc.collect()
    assert len(packed_ids._known) == before


def advantages(rewards_N: Tensor, values_T: Tensor, mask_T: Tensor, ids_T: Tensor) -> Tensor:
    groups_N = torch.arange(len(rewards_N)) // 2
    batch = RolloutBatch(
        rewards_N=rewards_N, group_ids_N=groups_N, loss_mask_T=mask_T, segment_ids_T=ids_T, old_logprobs_T=values_T
    )
    return compute_advantages(PolicyAlgorithm(advantage=components.GroupNorm()), batch).advantages_T


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "advantages": advantages,
    "spread_to_tokens": lambda rewards, values, mask, ids: segments.spread_to_tokens(rewards, ids),
    "sums": lambda rewards, values, mask, ids: segments.segment_sums(values, segments.segment_index(mask, ids)),
    "lengths": lambda rewards, values, mask, ids: segments.segment_lengths(mask, ids),
    "weights": lambda rewards, values, mask, ids: sequence_mean_token_mean(mask, ids, 3),
    "kept": lambda rewards, values, mask, ids: off_policy_sequence_mask(values, values, mask, ids, 0.01),
    "rewards": lambda rewards, values, mask, ids: token_rewards(rewards, values, mask, ids, coefficient=0.1),
    "follows": lambda rewards, values, mask, ids: reverse_scan.same_sequence(ids, reverse_scan.loss_positions(mask)),
    "last": lambda rewards, values, mask, ids: reverse_scan.last_positions(ids, reverse_scan.loss_positions(mask)),
}


@pytest.mark.parametrize("share_kept", [1.0, 0.7])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_to_the_bit_those_of_ids_that_are_read(name: str, share_kept: float) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        ids_T = packed_segment_ids(lengths_of(seed))
        rewards_N = torch.randn(len(lengths_of(seed)), generator=generator, dtype=torch.float64)
        values_T = torch.randn(ids_T.shape, generator=generator)
        mask_T = torch.rand(ids_T.shape, generator=generator) < share_kept
        assert known_runs(ids_T) is not None
        found, read = (FUNCTIONS[name](rewards_N, values_T, mask_T, each_T) for each_T in (ids_T, ids_T.clone()))
        assert torch.equal(found, read)
        assert found.dtype == read.dtype


@pytest.mark.parametrize("name", FUNCTIONS)
def test_known_ids_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_T, mask_T = packed_segment_ids(torch.tensor([2, 1])), torch.ones(3, dtype=torch.bool)
    rewards_N, values_T = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 0.25, 4.0])
    expected = FUNCTIONS[name](rewards_N, values_T, mask_T, ids_T)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the ids are read")

    monkeypatch.setattr(Tensor, "unique_consecutive", read)
    assert torch.equal(FUNCTIONS[name](rewards_N, values_T, mask_T, ids_T), expected)
    if name not in ("advantages", "spread_to_tokens", "follows"):
        with pytest.raises(AssertionError, match="the ids are read"):
            FUNCTIONS[name](rewards_N, values_T, mask_T, ids_T.clone())


def test_a_sequence_without_a_value_is_refused_however_its_ids_were_made() -> None:
    ids_T = packed_segment_ids(torch.tensor([200, 200]))
    for each_T in (ids_T, ids_T.clone()):
        with pytest.raises(IndexError):
            segments.spread_to_tokens(torch.ones(1), each_T)


def test_traced_code_does_not_look_for_runs() -> None:
    ids_T = packed_segment_ids(torch.tensor([2, 1]))
    seen: list[object] = []

    def loss(values_T: Tensor) -> Tensor:
        seen.append(known_runs(ids_T))
        return values_T.sum()

    torch.func.grad(loss)(torch.ones(3))
    assert seen == [None]
