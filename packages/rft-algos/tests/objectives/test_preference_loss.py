"""Every loss type is its equation, with weights and likelihood added as their papers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.preference import SORTED, PreferenceLoss, PreferenceLossType, weighted_losses
from rft_algos.input_checks import InputError
from rft_algos.losses.preference_variants import Pairs
from rft_algos.objectives.preference_loss import (
    PairLogprobs,
    implicit_rewards,
    in_order,
    labelled_losses,
    pair_losses,
    pairs_in_order,
)

CHOSEN, REJECTED = [-3.0, -1.0, -8.0], [-4.0, -0.5, -2.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-3.5, -2.0, -7.0], [-3.0, -1.5, -3.0]
LENGTHS = [3.0, 2.0, 4.0], [4.0, 1.0, 2.0]


def given(*, gradient: bool = False) -> PairLogprobs:
    chosen, rejected, *reference = (
        torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
    )
    pairs = Pairs(chosen.requires_grad_(gradient), rejected.requires_grad_(gradient), *reference)
    return PairLogprobs(pairs, *(torch.tensor(values, dtype=torch.float64) for values in LENGTHS))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# (x_c, x_r, mean log pi(c), mean log pi(r), lengths) -> loss, written by hand for beta 0.2
TWINS: dict[PreferenceLossType, Callable[..., float]] = {
    "sigmoid": lambda c, r, **_: -log_sigmoid(0.2 * (c - r)),
    "hinge": lambda c, r, **_: max(0.0, 1 - 0.2 * (c - r)),
    "ipo": lambda c, r, n, m, **_: (c / n - r / m - 2.5) ** 2,
    "ipo_sum": lambda c, r, **_: (c - r - 2.5) ** 2,
    "exo_pair": lambda c, r, **_: (
        sigmoid(0.2 * (c - r)) * (log_sigmoid(0.2 * (c - r)) - math.log(1 - 1e-3))
        + sigmoid(0.2 * (r - c)) * (log_sigmoid(0.2 * (r - c)) - math.log(1e-3))
    ),
    "nca_pair": lambda c, r, **_: -log_sigmoid(0.2 * c) - (log_sigmoid(-0.2 * c) + log_sigmoid(-0.2 * r)) / 2,
    "bco_pair": lambda c, r, **_: -log_sigmoid(0.2 * c) - log_sigmoid(-0.2 * r),
    "robust": lambda c, r, **_: -log_sigmoid(0.2 * (c - r)),
    "sppo_hard": lambda c, r, **_: (c - 2.5) ** 2 + (r + 2.5) ** 2,
    "apo_zero": lambda c, r, **_: 1 - sigmoid(0.2 * c) + sigmoid(0.2 * r),
    "apo_down": lambda c, r, **_: sigmoid(0.2 * c) + 1 - sigmoid(0.2 * (c - r)),
    "discopop": lambda c, r, **_: (
        -(1 - sigmoid(4 * (c - r))) * log_sigmoid(0.2 * (c - r)) + sigmoid(4 * (c - r)) * math.exp(-0.2 * (c - r))
    ),
    "orpo": lambda a, b, **_: -a - 0.2 * log_sigmoid(a - math.log(1 - math.exp(a)) - b + math.log(1 - math.exp(b))),
    "simpo": lambda a, b, **_: -log_sigmoid(0.2 * (a - b) - 0.5),
    "cpo": lambda a, b, n, m, **_: -log_sigmoid(0.2 * (a * n - b * m)) - a * n,
}


def quantiles(loss_type: PreferenceLossType) -> list[float]:
    """What is sorted apart and then compared."""
    four = CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED
    if loss_type == "aot":
        upper, lower = ([c - r for c, r in zip(*pair, strict=True)] for pair in (four[:2], four[2:]))
    else:
        upper, lower = ([p - q for p, q in zip(*pair, strict=True)] for pair in (four[0::2], four[1::2]))
    return [-log_sigmoid(0.2 * (a - b)) for a, b in zip(sorted(upper), sorted(lower), strict=True)]


def expected(loss_type: PreferenceLossType) -> list[float]:
    if loss_type in SORTED:
        return quantiles(loss_type)
    losses: list[float] = []
    rows = zip(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, *LENGTHS, strict=True)
    for chosen, rejected, reference_chosen, reference_rejected, n, m in rows:
        twin: Any = TWINS[loss_type]
        if loss_type in ("orpo", "simpo", "cpo"):
            losses.append(twin(a=chosen / n, b=rejected / m, n=n, m=m))
        else:
            losses.append(twin(c=chosen - reference_chosen, r=rejected - reference_rejected, n=n, m=m))
    return losses


def test_every_loss_of_pairs_has_a_twin() -> None:
    assert {*TWINS, *SORTED, "kto"} == {*get_args(PreferenceLossType)}


@pytest.mark.parametrize("loss_type", [*TWINS, *SORTED])
def test_a_loss_type_is_its_equation(loss_type: PreferenceLossType) -> None:
    losses = pair_losses(PreferenceLoss(loss_type=loss_type, beta=0.2), given())
    assert losses.tolist() == pytest.approx(expected(loss_type), rel=1e-9)


@pytest.mark.parametrize("loss_type", [*TWINS, *SORTED])
def test_only_the_policy_has_a_gradient(loss_type: PreferenceLossType) -> None:
    of = given(gradient=True)
    pair_losses(PreferenceLoss(loss_type=loss_type), of).sum().backward()
    gradient = of.pairs.policy_chosen_B.grad
    assert isinstance(gradient, Tensor)
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).any())


def test_smoothed_labels_mix_both_orders() -> None:
    plain = pair_losses(PreferenceLoss(beta=0.2, label_smoothing=0.25), given()).tolist()
    margins = [1.5, 0.0, -2.0]
    ratios = [
        c - rc - r + rr for c, r, rc, rr in zip(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, strict=True)
    ]
    assert ratios == margins
    assert plain == pytest.approx([-0.75 * log_sigmoid(0.2 * m) - 0.25 * log_sigmoid(-0.2 * m) for m in margins])


def test_the_reverse_divergence_is_dpo_and_others_are_not() -> None:
    dpo = pair_losses(PreferenceLoss(), given())
    other = pair_losses(PreferenceLoss(f_divergence="jensen_shannon"), given())
    near = pair_losses(PreferenceLoss(f_divergence="alpha", f_alpha=1e-6), given())
    assert near.tolist() == pytest.approx(dpo.tolist(), rel=1e-4)
    assert not torch.allclose(dpo, other)


def test_weights_of_wpo_multiply_and_have_no_gradient() -> None:
    of = given(gradient=True)
    losses = pair_losses(PreferenceLoss(use_weighting=True), of)
    weights = [math.exp(min(0.0, c / n + r / m)) for c, r, n, m in zip(CHOSEN, REJECTED, *LENGTHS, strict=True)]
    plain = pair_losses(PreferenceLoss(), of)
    assert losses.tolist() == pytest.approx([w * x for w, x in zip(weights, plain.tolist(), strict=True)])
    (weighted,) = torch.autograd.grad(losses.sum(), of.pairs.policy_chosen_B)
    (unweighted,) = torch.autograd.grad(plain.sum(), of.pairs.policy_chosen_B)
    assert weighted.tolist() == pytest.approx([w * x for w, x in zip(weights, unweighted.tolist(), strict=True)])


def test_the_likelihood_that_is_added_is_a_token() -> None:
    more = pair_losses(PreferenceLoss(rpo_alpha=2.0), given()) - pair_losses(PreferenceLoss(), given())
    assert more.tolist() == pytest.approx([-2 * c / n for c, n in zip(CHOSEN, LENGTHS[0], strict=True)])


def test_rewards_are_what_the_loss_compares() -> None:
    chosen, rejected = implicit_rewards(PreferenceLoss(beta=0.2), given(gradient=True))
    assert chosen.tolist() == pytest.approx([0.1, 0.2, -0.2])
    assert rejected.tolist() == pytest.approx([-0.2, 0.2, 0.2])
    assert not chosen.requires_grad
    chosen, _ = implicit_rewards(PreferenceLoss(loss_type="simpo"), given())
    assert chosen.tolist() == pytest.approx([-2.0, -1.0, -4.0])


def test_rewards_within_rounding_are_a_tie() -> None:
    first, second = torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([1.0 + 1e-6, 1.1, 0.9, 2.0])
    assert in_order(first, second, torch.full((4,), 10.0)).tolist() == [0.5, 0.0, 1.0, 0.5]
    assert pairs_in_order(PreferenceLoss(), given(gradient=True)).tolist() == [1.0, 0.5, 0.0]


def test_labelled_responses_are_pulled_to_both_sides_of_the_point() -> None:
    policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0])
    config = PreferenceLoss(loss_type="kto", beta=0.2, undesirable_weight=3.0)
    losses = labelled_losses(config, policy, reference, torch.tensor([True, False]), 0.5)
    assert losses.tolist() == pytest.approx([1 - sigmoid(0.1), 3 * (1 - sigmoid(-0.1))])
    with pytest.raises(InputError, match="no loss of pairs"):
        pair_losses(config, given())


def test_several_losses_are_added_up_each_with_its_own_beta() -> None:
    mixed = PreferenceLoss(loss_weights=weighted_losses("sigmoid=0.8, bco_pair=0.2,simpo=2"))
    alone = [pair_losses(PreferenceLoss(loss_type=name), given()) for name in ("sigmoid", "bco_pair", "simpo")]
    torch.testing.assert_close(pair_losses(mixed, given()), 0.8 * alone[0] + 0.2 * alone[1] + 2 * alone[2])
    assert mixed.needs_reference


@pytest.mark.parametrize(
    "text", ["sigmoid", "sigmoid=0", "sigmoid=x", "dpo=1", "hinge=1", "sigmoid=1,sigmoid=2", "sigmoid=1,kto=1"]
)
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        PreferenceLoss(loss_weights=weighted_losses(text))


def test_a_margin_moves_what_the_chosen_response_has_to_be_better_by() -> None:
    of = given()
    moved = replace(of, margins_B=torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64))
    losses = pair_losses(PreferenceLoss(beta=0.2), moved).tolist()
    apart = [0.2 * 1.5 - 0.5, 0.0, 0.2 * -2.0 + 1.0]
    assert losses == pytest.approx([-log_sigmoid(x) for x in apart])


@pytest.mark.parametrize("loss_type", SORTED)
def test_quantiles_have_smoothed_labels(loss_type: PreferenceLossType) -> None:
    plain = pair_losses(PreferenceLoss(loss_type=loss_type, beta=0.2), given())
    smoothed = pair_losses(PreferenceLoss(loss_type=loss_type, beta=0.2, label_smoothing=0.25), given())
    # -log sigmoid(-x) = x - log sigmoid(x), and x = -log(exp(l) - 1)
    other = plain - torch.log(torch.expm1(plain))
    torch.testing.assert_close(smoothed, 0.75 * plain + 0.25 * other)
