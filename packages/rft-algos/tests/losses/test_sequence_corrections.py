"""Lower bounds, geometric weights, divergence masks and self-normalised weights, against plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.algorithms.components import GeometricTis, SecondMoment, SelfNormalised, SequenceTis, TokenTis, Veto
from rft_algos.algorithms.components import Product as Both
from rft_algos.algorithms.registry import equation_of
from rft_algos.input_checks import InputError
from rft_algos.losses import off_policy, sequence_corrections
from rft_algos.losses.sequence_corrections import Measure
from rft_algos.packed import token_selection
from rft_core.errors import OptionsError

D = torch.float64
NUMBERS = random.Random(3)
IDS = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, -1]
MASK = [True, False, True, True, True, True, False, False, False, False, False]
RHO = [NUMBERS.gauss(0, 1) if kept else math.nan for kept in MASK]
TENSORS = (torch.tensor(RHO, dtype=D), torch.tensor(MASK), torch.tensor(IDS))
OWN = {i: [x for x, kept, j in zip(RHO, MASK, IDS, strict=True) if kept and j == i] for i in range(3)}


def at_tokens(of_sequence: dict[int, float]) -> list[float]:
    return [of_sequence[i] if kept else 0.0 for i, kept in zip(IDS, MASK, strict=True)]


@pytest.mark.parametrize(("cap", "floor"), [(2.0, 0.0), (1.3, 0.8), (5.0, 1.0)])
def test_weights_lie_between_floor_and_cap(cap: float, floor: float) -> None:
    tokens = off_policy.truncate_tokens(TENSORS[0][TENSORS[1]], cap, floor)
    expected = [max(min(math.exp(x), cap), floor) for x, kept in zip(RHO, MASK, strict=True) if kept]
    assert tokens.tolist() == pytest.approx(expected)
    sums = {i: max(min(math.exp(sum(own)), cap), floor) for i, own in OWN.items()}
    assert off_policy.truncate_sequences(*TENSORS, cap, floor).tolist() == pytest.approx(at_tokens(sums))
    means = {i: max(min(math.exp(sum(own) / len(own)), cap), floor) for i, own in OWN.items()}
    assert sequence_corrections.truncate_geometric(*TENSORS, cap, floor).tolist() == pytest.approx(at_tokens(means))


@pytest.mark.parametrize("measure", ["mean_k2", "mean_k3", "max_k2", "max_k3"])
@pytest.mark.parametrize("limit", [0.0, 0.05, 0.3, 1.0, 50.0])
def test_sequences_beyond_the_limit_are_dropped(measure: Measure, limit: float) -> None:
    def distance(x: float) -> float:
        return x * x / 2 if measure.endswith("k2") else math.exp(x) - 1 - x

    def of(own: list[float]) -> float:
        values = [distance(x) for x in own]
        return max(values) if measure.startswith("max") else sum(values) / len(values)

    expected = at_tokens({i: float(of(own) <= limit) for i, own in OWN.items()})
    assert sequence_corrections.mask_sequences_divergence(*TENSORS, limit, measure).tolist() == expected


def test_a_fall_and_a_rise_do_not_cancel() -> None:
    log_rho, mask, ids = torch.tensor([1.0, -1.0]), torch.tensor([True, True]), torch.tensor([0, 0])
    assert off_policy.mask_sequences_geometric(log_rho, mask, ids, 0.99, 1.01).tolist() == [1.0, 1.0]
    assert sequence_corrections.mask_sequences_divergence(log_rho, mask, ids, 0.4, "mean_k2").tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="mean_k2, mean_k3"):
        sequence_corrections.mask_sequences_divergence(log_rho, mask, ids, 0.4, "k2")  # type: ignore[arg-type]


def test_self_normalised_weights_have_mean_1_over_the_step() -> None:
    weights, mask = torch.tensor([1.0, 3.0, math.nan, 4.0], dtype=D), torch.tensor([True, True, False, True])
    assert sequence_corrections.self_normalised(weights, mask).tolist() == pytest.approx([3 / 8, 9 / 8, 0, 12 / 8])
    # the same in two parts, with the numbers of the step
    parts = [
        sequence_corrections.self_normalised(weights[part], mask[part], total_weight=8.0, num_tokens=3)
        for part in (slice(0, 2), slice(2, 4))
    ]
    assert torch.cat(parts).tolist() == sequence_corrections.self_normalised(weights, mask).tolist()
    assert sequence_corrections.self_normalised(weights * 0, mask).tolist() == [0.0] * 4


def test_log_probs_between_two_versions() -> None:
    behaviour, current = torch.full((4,), -2.0, dtype=D), torch.full((4,), -1.0, dtype=D)
    versions = torch.tensor([1, 3, 4, 5])
    found = sequence_corrections.interpolated_logprobs(
        behaviour, current, behaviour_versions_T=versions, proximal_version=4, version=5
    )
    # 3 of 4 versions, 1 of 2, none, and a token of the present version
    assert found.tolist() == pytest.approx([-1.25, -1.5, -2.0, -1.0])
    with pytest.raises(InputError, match="at least proximal_version"):
        sequence_corrections.interpolated_logprobs(
            behaviour, current, behaviour_versions_T=versions, proximal_version=6, version=5
        )


def test_records_reach_them_and_corrections_multiply() -> None:
    log_rho, mask, ids = torch.where(TENSORS[1], TENSORS[0], 0.0), TENSORS[1], TENSORS[2]
    for part, expected in (
        (TokenTis(cap=1.5, floor=0.5), off_policy.truncate_tokens(log_rho, 1.5, 0.5)),
        (SequenceTis(cap=1.5, floor=0.5), off_policy.truncate_sequences(log_rho, mask, ids, 1.5, 0.5)),
        (GeometricTis(cap=1.5, floor=0.5), sequence_corrections.truncate_geometric(log_rho, mask, ids, 1.5, 0.5)),
        (
            SecondMoment(limit=0.1),
            token_selection.second_moment_tokens(log_rho, mask, limit=0.1).double(),
        ),
        (
            SelfNormalised(part=TokenTis(cap=1.5)),
            sequence_corrections.self_normalised(off_policy.truncate_tokens(log_rho, 1.5), mask),
        ),
        (Veto(low=0.3), off_policy.veto_outliers(log_rho, mask, ids, 0.3)),
        (
            Both(parts=(Veto(low=0.3), TokenTis(cap=1.5))),
            off_policy.veto_outliers(log_rho, mask, ids, 0.3) * off_policy.truncate_tokens(log_rho, 1.5),
        ),
    ):
        assert torch.equal(equation_of(part)(part, log_rho, mask, ids), expected)
    with pytest.raises(OptionsError, match="floor"):
        TokenTis(floor=1.5)
    with pytest.raises(OptionsError, match="one or more"):
        Both(parts=())
