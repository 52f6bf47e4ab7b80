"""The relatives of DPO against their equations in plain Python, and their gradients against finite differences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.losses import preference_variants as variants
from rft_algos.losses.preference import dpo
from rft_algos.losses.preference_variants import Pairs

D = torch.float64
POLICY_C, POLICY_R = [-5.0, -8.0, -3.0, -20.0], [-6.0, -7.5, -3.0, -9.0]
REFERENCE_C, REFERENCE_R = [-5.5, -7.0, -2.2, -18.0], [-5.0, -9.0, -4.7, -9.5]
NUMBERS = (POLICY_C, POLICY_R, REFERENCE_C, REFERENCE_R)
BETA = 0.3


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return math.log(sigmoid(x))


def of_pairs(loss: Callable[[float, float], float]) -> list[float]:
    """The loss of x_c and x_r of every pair."""
    return [loss(pc - rc, pr - rr) for pc, pr, rc, rr in zip(*NUMBERS, strict=True)]


def slope(divergence: str) -> Callable[[float], float]:
    return {
        "reverse_kl": lambda x: x,
        "forward_kl": lambda x: -math.exp(-x),
        "jensen_shannon": lambda x: math.log(2 * math.exp(x) / (1 + math.exp(x))),
        "alpha": lambda x: (1 - math.exp(x) ** -0.4) / 0.4,
    }[divergence]


def f_dpo(divergence: str) -> list[float]:
    d = slope(divergence)
    return of_pairs(lambda c, r: -log_sigmoid(BETA * (d(c) - d(r))))


def quantiles(first: list[float], second: list[float]) -> list[float]:
    return [-log_sigmoid(BETA * (a - b)) for a, b in zip(sorted(first), sorted(second), strict=True)]


def exo(c: float, r: float) -> float:
    s, e = sigmoid(BETA * (c - r)), 0.05
    return s * math.log(s / (1 - e)) + (1 - s) * math.log((1 - s) / e)


def discopop(c: float, r: float) -> float:
    z = BETA * (c - r)
    m = sigmoid(z / 0.2)
    return -(1 - m) * log_sigmoid(z) + m * math.exp(-z)


CASES: dict[str, tuple[Callable[[Pairs], Tensor], list[float]]] = {
    "hinge": (lambda p: variants.hinge(p, beta=BETA), of_pairs(lambda c, r: max(0.0, 1 - BETA * (c - r)))),
    "robust_dpo": (
        lambda p: variants.robust_dpo(p, beta=BETA, label_noise=0.2),
        of_pairs(lambda c, r: (-0.8 * log_sigmoid(BETA * (c - r)) + 0.2 * log_sigmoid(-BETA * (c - r))) / 0.6),
    ),
    "exo": (lambda p: variants.exo(p, beta=BETA, label_smoothing=0.05), of_pairs(exo)),
    "nca": (
        lambda p: variants.nca(p, beta=BETA),
        of_pairs(lambda c, r: -log_sigmoid(BETA * c) - 0.5 * log_sigmoid(-BETA * c) - 0.5 * log_sigmoid(-BETA * r)),
    ),
    "bco": (
        lambda p: variants.bco(p, 0.4, beta=BETA),
        of_pairs(lambda c, r: -log_sigmoid(BETA * c - 0.4) - log_sigmoid(0.4 - BETA * r)),
    ),
    "sppo": (
        lambda p: variants.sppo(p, beta=BETA),
        of_pairs(lambda c, r: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2),
    ),
    "aot_paired": (
        lambda p: variants.aot_paired(p, beta=BETA),
        quantiles(
            [c - r for c, r in zip(POLICY_C, POLICY_R, strict=True)],
            [c - r for c, r in zip(REFERENCE_C, REFERENCE_R, strict=True)],
        ),
    ),
    "aot_unpaired": (
        lambda p: variants.aot_unpaired(p, beta=BETA),
        quantiles(of_pairs(lambda c, r: c), of_pairs(lambda c, r: r)),
    ),
    "apo_zero": (
        lambda p: variants.apo_zero(p, beta=BETA),
        of_pairs(lambda c, r: 1 - sigmoid(BETA * c) + sigmoid(BETA * r)),
    ),
    "apo_down": (
        lambda p: variants.apo_down(p, beta=BETA),
        of_pairs(lambda c, r: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r))),
    ),
    "discopop": (lambda p: variants.discopop(p, beta=BETA, temperature=0.2), of_pairs(discopop)),
    **{
        f"f_dpo {name}": (
            lambda p, name=name: variants.f_dpo(p, beta=BETA, divergence=name, alpha=0.4),  # type: ignore[misc]
            f_dpo(name),
        )
        for name in ("reverse_kl", "forward_kl", "jensen_shannon", "alpha")
    },
    "cpo": (
        lambda p: variants.cpo(p.policy_chosen_B, p.policy_rejected_B, beta=BETA, coefficient=0.5),
        [-log_sigmoid(BETA * (c - r)) - 0.5 * c for c, r in zip(POLICY_C, POLICY_R, strict=True)],
    ),
    "reward_centring": (
        lambda p: variants.reward_centring(p.policy_chosen_B, p.policy_rejected_B, coefficient=0.1),
        [0.1 * (c + r) ** 2 for c, r in zip(POLICY_C, POLICY_R, strict=True)],
    ),
}


def pairs(policy_chosen: Tensor | None = None, policy_rejected: Tensor | None = None) -> Pairs:
    given = [torch.tensor(values, dtype=D) for values in NUMBERS]
    chosen = given[0] if policy_chosen is None else policy_chosen
    return Pairs(chosen, given[1] if policy_rejected is None else policy_rejected, given[2], given[3])


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_equation(name: str) -> None:
    loss, expected = CASES[name]
    assert loss(pairs()).tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_value_and_none_reaches_the_reference(name: str) -> None:
    loss = CASES[name][0]
    leaves = [torch.tensor(values, dtype=D).requires_grad_() for values in NUMBERS]
    assert torch.autograd.gradcheck(lambda c, r: loss(pairs(c, r)), (leaves[0], leaves[1]))
    loss(Pairs(*leaves)).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[2].grad is leaves[3].grad is None


DEFAULTS = {
    "hinge": {"beta": 0.1},
    "robust_dpo": {"beta": 0.1, "label_noise": 0.1},
    "exo": {"beta": 0.1, "label_smoothing": 1e-3},
    "nca": {"beta": 0.1},
    "bco": {"beta": 0.1},
    "sppo": {"beta": 0.1},
    "aot_paired": {"beta": 0.1, "label_smoothing": 0.0},
    "aot_unpaired": {"beta": 0.1, "label_smoothing": 0.0},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "discopop": {"beta": 0.05, "temperature": 0.05},
    "f_dpo": {"beta": 0.1, "divergence": "reverse_kl", "alpha": 0.5},
    "cpo": {"beta": 0.1, "coefficient": 1.0},
    "reward_centring": {"coefficient": 0.01},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_not_given_is_as_published(name: str) -> None:
    parameters = inspect.signature(getattr(variants, name)).parameters.values()
    given = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    assert given == DEFAULTS[name]


def test_special_cases_are_dpo() -> None:
    expected = dpo(*(torch.tensor(values, dtype=D) for values in NUMBERS), beta=BETA)
    torch.testing.assert_close(variants.f_dpo(pairs(), beta=BETA), expected)
    torch.testing.assert_close(variants.robust_dpo(pairs(), beta=BETA, label_noise=0.0), expected)
    small = variants.f_dpo(pairs(), beta=BETA, divergence="alpha", alpha=1e-6)
    torch.testing.assert_close(small, expected, rtol=1e-4, atol=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    right = pairs()
    wrong = Pairs(right.policy_rejected_B, right.policy_chosen_B, right.reference_rejected_B, right.reference_chosen_B)
    e, clean = 0.2, variants.robust_dpo(right, beta=BETA, label_noise=0.0)
    mixed = (1 - e) * variants.robust_dpo(right, beta=BETA, label_noise=e)
    mixed = mixed + e * variants.robust_dpo(wrong, beta=BETA, label_noise=e)
    torch.testing.assert_close(mixed, clean)


@pytest.mark.parametrize("far", [1e3, -1e3])
@pytest.mark.parametrize("name", CASES)
def test_far_log_probs_make_no_nan(name: str, far: float) -> None:
    leaf = torch.tensor([far] * 4, dtype=torch.float32).requires_grad_()
    others = [torch.zeros(4) for _ in range(3)]
    loss = CASES[name][0](Pairs(leaf, *others))
    loss.sum().backward()
    assert leaf.grad is not None
    assert not bool(loss.isnan().any() | leaf.grad.isnan().any())


def test_weights_of_pairs_by_how_likely_they_are() -> None:
    mean_chosen, mean_rejected = torch.tensor([-1.0, 0.5]).requires_grad_(), torch.tensor([-0.5, 0.25])
    found = variants.wpo_weights(mean_chosen, mean_rejected)
    assert found.tolist() == pytest.approx([math.exp(-1.5), 1.0])
    assert not found.requires_grad


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_excess_over_the_shorter_response_counts_less(alpha: float) -> None:
    mask = torch.tensor([[False, True, True, True, True], [True, True, True, False, False]])
    logprobs = torch.where(mask, torch.tensor([[9.0, -1.0, -2.0, -4.0, -8.0], [-1.0, -2.0, -4.0, 9.0, 9.0]]), math.nan)
    logprobs.requires_grad_()
    found = variants.length_desensitised(logprobs, mask, torch.tensor([3, 4]), alpha=alpha)
    assert found.tolist() == pytest.approx([-7 - 8 * alpha, -7.0])
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 1.0, 1.0, 1.0, pytest.approx(alpha)], [1.0, 1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda: variants.hinge(pairs(), beta=0.0),
        lambda: variants.robust_dpo(pairs(), label_noise=0.5),
        lambda: variants.exo(pairs(), label_smoothing=0.0),
        lambda: variants.f_dpo(pairs(), divergence="kl"),  # type: ignore[arg-type]
        lambda: variants.f_dpo(pairs(), alpha=1.0),
        lambda: variants.discopop(pairs(), temperature=-1.0),
        lambda: variants.reward_centring(torch.ones(1), torch.ones(1), coefficient=-1.0),
    ],
)
def test_numbers_outside_their_range_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(InputError):
        call()
