from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_algos.losses import aggregation, off_policy
from rft_algos.losses.off_policy import (
    effective_sample_size,
    mask_sequences,
    mask_sequences_geometric,
    mask_tokens,
    mismatch_maxima,
    mismatch_metrics,
    off_policy_sequence_mask,
    truncate_sequences,
    truncate_tokens,
    veto_outliers,
)

NAN = math.nan
SEQUENCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "truncate_sequences": truncate_sequences,
    "mask_sequences": lambda x, m, s: mask_sequences(x, m, s, 0.4, 2.5),
    "mask_sequences_geometric": lambda x, m, s: mask_sequences_geometric(x, m, s, 0.8, 1.2),
    "off_policy_sequence_mask": lambda x, m, s: off_policy_sequence_mask(x, torch.cos(x), m, s, 0.1),
    "veto_outliers": lambda x, m, s: veto_outliers(x, m, s, 0.3, 3.0),
}
TOKENS: dict[str, Callable[[Tensor], Tensor]] = {"truncate_tokens": truncate_tokens, "mask_tokens": mask_tokens}


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bounded_exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def ragged(seed: int, spread: float) -> tuple[list[float], list[bool], list[int]]:
    numbers = random.Random(seed)
    lengths = [numbers.choice([1, 1, 2, 3, 8, 17]) for _ in range(numbers.randint(1, 8))]
    names = numbers.sample(range(sum(lengths)), len(lengths))
    ids = [i for i, length in zip(names, lengths, strict=True) for _ in range(length)] + [-1, -1]
    masked_row = numbers.choice(names)
    mask = [numbers.random() < 0.7 and i not in (-1, masked_row) for i in ids]
    return [numbers.gauss(0, spread) if kept else NAN for kept in mask], mask, ids


def over_sequences(
    lists: tuple[list[float], list[bool], list[int]], weight: Callable[[list[int]], float]
) -> list[float]:
    """`weight` of the places of a sequence's loss tokens, at each of them; 0 elsewhere."""
    _, mask, ids = lists
    return [weight([u for u, j in enumerate(ids) if j == i and mask[u]]) if mask[t] else 0.0 for t, i in enumerate(ids)]


def tensors(lists: tuple[list[float], list[bool], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    return doubles(*lists[0]), torch.tensor(lists[1]), torch.tensor(lists[2])


def test_hand_computed_weights_of_tokens():
    log_rho = doubles(3.0, 2.0, 0.25, 0.5, 5.0, 5.001).log()
    assert truncate_tokens(log_rho).tolist() == pytest.approx([2.0, 2.0, 0.25, 0.5, 2.0, 2.0], rel=1e-12)
    assert truncate_tokens(log_rho, 4.0).tolist() == pytest.approx([3.0, 2.0, 0.25, 0.5, 4.0, 4.0], rel=1e-12)
    assert mask_tokens(log_rho).tolist() == pytest.approx([3.0, 2.0, 0.0, 0.5, 5.0, 0.0], rel=1e-12)
    assert mask_tokens(log_rho, 0.2, 2.5).tolist() == pytest.approx([0.0, 2.0, 0.25, 0.5, 0.0, 0.0], rel=1e-12)


def test_hand_computed_weights_of_sequences():
    # sequence 3: 2 and 0.25, product 0.5, geometric mean 0.7071; sequence 0: 3 and 2, product 6, mean 2.449
    log_rho, mask = doubles(2.0, 9.0, 0.25, 3.0, 2.0, 7.0).log(), torch.tensor([True, False, True, True, True, False])
    ids = torch.tensor([3, 3, 3, 0, 0, -1])
    assert truncate_sequences(log_rho, mask, ids).tolist() == pytest.approx([0.5, 0.0, 0.5, 2.0, 2.0, 0.0])
    assert truncate_sequences(log_rho, mask, ids, 9.0).tolist() == pytest.approx([0.5, 0.0, 0.5, 6.0, 6.0, 0.0])
    found = mask_sequences(log_rho, mask, ids, 0.4, 3.0)
    assert found.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0, 0.0, 0.0])
    found = mask_sequences(log_rho, mask, ids, 0.6, 7.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 6.0, 6.0, 0.0])
    assert mask_sequences_geometric(log_rho, mask, ids, 0.7, 2.4).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert mask_sequences_geometric(log_rho, mask, ids, 0.71, 2.45).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert veto_outliers(log_rho, mask, ids, 0.2, 2.5).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert veto_outliers(log_rho, mask, ids, 0.3).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_hand_computed_off_policy_mask():
    drift, mask = doubles(0.3, 9.0, 0.1, 0.3, 0.1, 0.1), torch.tensor([True, False, True, True, True, True])
    ids, advantages = torch.tensor([1, 1, 1, 0, 0, 5]), doubles(-1.0, 9.0, -1.0, 1.0, 1.0, -1.0)
    # means 0.2, 0.2, 0.1 of advantages -1, 1, -1
    found = off_policy_sequence_mask(drift, advantages, mask, ids, 0.15)
    assert found.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert off_policy_sequence_mask(-drift, advantages, mask, ids, 0.15).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    # token advantages of one sequence are averaged: -3 and 1
    advantages = doubles(-3.0, 9.0, 1.0, 1.0, -3.0, 0.0)
    found = off_policy_sequence_mask(drift, advantages, mask, ids, 0.05)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("spread", [0.05, 0.7, 30.0])
def test_equals_a_plain_twin(seed: int, spread: float):
    lists = ragged(seed, spread)
    x, (log_rho, mask, ids) = lists[0], tensors(lists)
    numbers = random.Random(seed + 1000)
    advantages = [numbers.gauss(0, 1) if kept else NAN for kept in lists[1]]

    def product(own: list[int]) -> float:
        return bounded_exp(math.fsum(x[u] for u in own))

    def mean(values: list[float], own: list[int]) -> float:
        return math.fsum(values[u] for u in own) / len(own)

    def check(found: Tensor, weight: Callable[[list[int]], float]) -> None:
        assert found.tolist() == pytest.approx(over_sequences(lists, weight), rel=1e-12)

    kept = [value for value in x if not math.isnan(value)]
    assert truncate_tokens(doubles(*kept)).tolist() == pytest.approx([min(bounded_exp(v), 2.0) for v in kept])
    expected = [r if 0.5 <= (r := bounded_exp(v)) <= 5.0 else 0.0 for v in kept]
    assert mask_tokens(doubles(*kept)).tolist() == pytest.approx(expected, rel=1e-12)
    check(truncate_sequences(log_rho, mask, ids), lambda own: min(product(own), 2.0))
    check(
        mask_sequences(log_rho, mask, ids, 0.4, 2.5),
        lambda own: product(own) if 0.4 <= product(own) <= 2.5 else 0.0,
    )
    check(
        mask_sequences_geometric(log_rho, mask, ids, 0.8, 1.2),
        lambda own: float(0.8 <= bounded_exp(mean(x, own)) <= 1.2),
    )
    check(
        off_policy_sequence_mask(log_rho, doubles(*advantages), mask, ids, 0.1),
        lambda own: float(not (mean(advantages, own) < 0 and mean(x, own) > 0.1)),
    )
    check(
        veto_outliers(log_rho, mask, ids, 0.3, 3.0),
        lambda own: float(all(0.3 <= bounded_exp(x[u]) <= 3.0 for u in own)),
    )


def test_the_bounds_are_those_of_the_sources_by_default():
    def defaults(function: object) -> list[object]:
        assert callable(function)
        parameters = inspect.signature(function).parameters.values()
        return [p.default for p in parameters if p.default is not inspect.Parameter.empty]

    assert defaults(truncate_tokens) == [2.0, 0.0]
    assert defaults(truncate_sequences) == [2.0, 0.0]
    assert defaults(mask_tokens) == [0.5, 5.0]
    assert defaults(veto_outliers) == [1e-4, math.inf]


def test_the_bounds_themselves_are_inside():
    log_two = math.log(2.0)  # exp gives exactly 2, and 0.5 for its negative
    up, down, mask, ids = doubles(log_two), doubles(-log_two), torch.tensor([True]), torch.tensor([0])
    just = (math.nextafter(2.0, 0.0), math.nextafter(0.5, 1.0))
    assert mask_tokens(up, 0.5, 2.0).tolist() == [2.0]
    assert mask_tokens(down, 0.5, 2.0).tolist() == [0.5]
    assert mask_tokens(up, 0.5, just[0]).tolist() == [0.0]
    assert mask_tokens(down, just[1], 2.0).tolist() == [0.0]
    for function, kept in (
        (mask_sequences, (2.0, 0.5)),
        (mask_sequences_geometric, (1.0, 1.0)),
        (veto_outliers, (1.0, 1.0)),
    ):
        assert function(up, mask, ids, 0.5, 2.0).tolist() == [kept[0]]
        assert function(down, mask, ids, 0.5, 2.0).tolist() == [kept[1]]
        assert function(up, mask, ids, 0.5, just[0]).tolist() == [0.0]
        assert function(down, mask, ids, just[1], 2.0).tolist() == [0.0]
    assert off_policy_sequence_mask(doubles(0.5), doubles(-1.0), mask, ids, 0.5).tolist() == [1.0]
    assert off_policy_sequence_mask(doubles(0.5), doubles(-1.0), mask, ids, 0.499).tolist() == [0.0]
    assert off_policy_sequence_mask(doubles(0.5), doubles(0.0), mask, ids, 0.1).tolist() == [1.0]


@pytest.mark.parametrize("name", [*SEQUENCES, *TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_type_of_the_input_and_no_gradient(name: str, dtype: torch.dtype):
    log_rho = torch.tensor([0.1, -0.2, 0.3], dtype=dtype, requires_grad=True)
    mask, ids = torch.tensor([True, True, True]), torch.tensor([0, 0, 1])
    found = TOKENS[name](log_rho) if name in TOKENS else SEQUENCES[name](log_rho, mask, ids)
    assert (found.dtype, found.requires_grad, found.shape) == (dtype, False, (3,))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("seed", range(10))
def test_a_weight_depends_on_its_own_sequence_alone(name: str, seed: int):
    lists = ragged(seed, 0.3)
    log_rho, mask, ids = tensors(lists)
    whole = SEQUENCES[name](log_rho, mask, ids)
    for i in reversed(sorted(set(lists[2]) - {-1})):
        own = ids == i
        alone = SEQUENCES[name](log_rho[own], mask[own], torch.zeros_like(ids[own]))
        torch.testing.assert_close(alone, whole[own], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", SEQUENCES)
def test_pitfall_6_nan_at_masked_positions_reaches_no_weight(name: str):
    for seed in range(5):
        log_rho, mask, ids = tensors(ragged(seed, 0.3))
        found = SEQUENCES[name](log_rho, mask, ids)
        assert bool(found.isfinite().all())
        assert bool((found[~mask] == 0).all())


def test_pitfall_10_products_leave_their_bounds_with_length_and_means_do_not():
    for length, product, mean in ((1000, 1.0, 1.0), (4000, 0.0, 1.0)):
        log_rho = torch.full((length,), 3e-4, dtype=torch.float64)
        mask, ids = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64)
        found = mask_sequences(log_rho, mask, ids, 0.0, 3.0)
        assert bool((found > 0).all()) == bool(product)
        assert float(mask_sequences_geometric(log_rho, mask, ids, 0.999, 1.001)[0]) == mean


@pytest.mark.parametrize("extreme", [1e30, -1e30, 1e4])
@pytest.mark.parametrize("name", [*SEQUENCES, *TOKENS])
def test_extreme_ratios_make_finite_weights(name: str, extreme: float):
    log_rho, mask, ids = torch.full((3,), extreme), torch.tensor([True] * 3), torch.tensor([0, 0, 1])
    found = TOKENS[name](log_rho) if name in TOKENS else SEQUENCES[name](log_rho, mask, ids)
    assert bool(found.isfinite().all())


def test_a_dropped_sequence_leaves_the_denominator_as_it_was():
    log_rho, mask, ids = doubles(9.0, 0.0, 0.0), torch.tensor([True] * 3), torch.tensor([0, 1, 1])
    weights = aggregation.token_mean(mask, 3, dtype=torch.float64)
    losses = doubles(5.0, 2.0, 4.0) * mask_sequences_geometric(log_rho, mask, ids, 0.5, 2.0)
    assert float(aggregation.weighted_sum(weights, losses)) == pytest.approx(6.0 / 3, rel=1e-12)


def plain_metrics(x: list[float], mask: list[bool], ids: list[int]) -> dict[str, tuple[float, float]]:
    kept = [t for t, flag in enumerate(mask) if flag]
    products = [bounded_exp(math.fsum(x[t] for t in kept if ids[t] == i)) for i in sorted({ids[t] for t in kept})]
    rho = [bounded_exp(x[t]) for t in kept]
    return {
        "mismatch/kl_k1": (math.fsum(-x[t] for t in kept), len(kept)),
        "mismatch/kl_k3": (math.fsum(r - 1 - x[t] for r, t in zip(rho, kept, strict=True)), len(kept)),
        "mismatch/weight": (math.fsum(rho), len(kept)),
        "mismatch/weight_square": (math.fsum(r * r for r in rho), len(kept)),
        "mismatch/sequence_weight": (math.fsum(products), len(products)),
        "mismatch/sequence_weight_square": (math.fsum(p * p for p in products), len(products)),
    }


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.1, 15.0])
def test_metrics_equal_a_plain_twin(seed: int, spread: float):
    lists = ragged(seed, spread)
    log_rho, mask, ids = tensors(lists)
    behaviour = torch.full_like(log_rho, -2.0)
    found = mismatch_metrics(log_rho + behaviour, behaviour, mask, ids)
    expected = plain_metrics(*lists)
    assert list(found) == list(expected)
    for name, (total, count) in found.items():
        assert (total.dtype, count.dtype, total.shape, count.shape) == (torch.float64, torch.float64, (), ())
        assert float(count) == expected[name][1]
        assert float(total) == pytest.approx(expected[name][0], rel=1e-9, abs=1e-12)
    worst = mismatch_maxima(log_rho + behaviour, behaviour, mask)
    kept = [v for v, flag in zip(lists[0], lists[1], strict=True) if flag]
    assert float(worst["mismatch/ratio_max"]) == pytest.approx(max([bounded_exp(v) for v in kept], default=0.0))
    expected_inverse = max([bounded_exp(-v) for v in kept], default=0.0)
    assert float(worst["mismatch/inverse_ratio_max"]) == pytest.approx(expected_inverse)


@pytest.mark.parametrize("seed", range(10))
def test_metrics_add_up_over_cuts(seed: int):
    lists = ragged(seed, 0.3)
    log_rho, mask, ids = tensors(lists)
    behaviour = torch.zeros_like(log_rho)
    whole, worst = mismatch_metrics(log_rho, behaviour, mask, ids), mismatch_maxima(log_rho, behaviour, mask)
    parts = [ids == i for i in sorted(set(lists[2]))]
    for name, pair in whole.items():
        pieces = [mismatch_metrics(log_rho[p], behaviour[p], mask[p], ids[p].clamp(max=0))[name] for p in parts]
        for k in range(2):
            assert float(sum(piece[k] for piece in pieces)) == pytest.approx(float(pair[k]), rel=1e-12, abs=1e-12)
    for name, value in worst.items():
        pieces = [mismatch_maxima(log_rho[p], behaviour[p], mask[p])[name] for p in parts]
        assert float(max(pieces)) == float(value)


def test_metrics_of_one_policy_and_of_nothing():
    x, mask, ids = doubles(-1.0, -2.0, NAN).requires_grad_(), torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
    found = {name: (float(t), float(n)) for name, (t, n) in mismatch_metrics(x, x, mask, ids).items()}
    assert found == {
        "mismatch/kl_k1": (0.0, 2.0),
        "mismatch/kl_k3": (0.0, 2.0),
        "mismatch/weight": (2.0, 2.0),
        "mismatch/weight_square": (2.0, 2.0),
        "mismatch/sequence_weight": (1.0, 1.0),
        "mismatch/sequence_weight_square": (1.0, 1.0),
    }
    none = torch.tensor([False] * 3)
    assert {(float(t), float(n)) for t, n in mismatch_metrics(x, x, none, ids).values()} == {(0.0, 0.0)}
    assert [float(v) for v in mismatch_maxima(x, x, none).values()] == [0.0, 0.0]
    assert [float(v) for v in mismatch_maxima(x[:0], x[:0], none[:0]).values()] == [0.0, 0.0]
    assert not any(v.requires_grad for v in mismatch_maxima(x, x, mask).values())
    assert not any(v.requires_grad for pair in mismatch_metrics(x, x, mask, ids).values() for v in pair)


def test_both_estimates_average_to_the_divergence_of_behaviour_from_old():
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    old, behaviour = torch.log_softmax(logits, -1)
    exact = float((behaviour.exp() * (behaviour - old)).sum())
    for name in ("mismatch/kl_k1", "mismatch/kl_k3"):
        average = sum(
            float(behaviour[v].exp())
            * float(
                mismatch_metrics(old[v : v + 1], behaviour[v : v + 1], torch.tensor([True]), torch.tensor([0]))[name][0]
            )
            for v in range(7)
        )
        assert average == pytest.approx(exact, rel=1e-12)


def test_the_log_ratio_of_the_metrics_is_taken_in_float64():
    old, behaviour = torch.tensor([-1.0000001, -3.0]), torch.tensor([-1.0, -3.0])
    exact = float(behaviour[0].double() - old[0].double())
    total, _ = mismatch_metrics(old, behaviour, torch.tensor([True, True]), torch.tensor([0, 1]))["mismatch/kl_k1"]
    assert float(total) == exact
    mixed = mismatch_metrics(old.double(), behaviour, torch.tensor([True, True]), torch.tensor([0, 1]))
    assert float(mixed["mismatch/kl_k1"][0]) == exact


def test_effective_sample_size():
    # (1 + 2 + 3)^2 / (1 + 4 + 9)
    assert effective_sample_size(6.0, 14.0) == pytest.approx(36 / 14, rel=1e-12)
    assert effective_sample_size(5.0, 5.0) == 5.0  # five weights of 1
    assert effective_sample_size(0.5, 0.25) == 1.0  # one weight of a half
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_every_public_function_is_in_one_of_these_tests():
    names = {n for n, f in vars(off_policy).items() if inspect.isfunction(f) and f.__module__ == off_policy.__name__}
    public = {n for n in names if not n.startswith("_")}
    assert public == {*SEQUENCES, *TOKENS, "mismatch_metrics", "mismatch_maxima", "effective_sample_size"}
