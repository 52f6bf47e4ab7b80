"""What every surrogate keeps to, whatever its equation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_algos import surrogates
from rft_algos.losses import aggregation

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
NONE = torch.zeros(1, dtype=torch.bool)

LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda lp, old, a, m, s: surrogates.ppo_clip(lp - old, a, 0.2, 0.28),
    "dual_clip": lambda lp, old, a, m, s: surrogates.dual_clip(lp - old, a, 0.2, 0.28),
    "two_sided": lambda lp, old, a, m, s: surrogates.two_sided(lp - old, a, 0.2, 0.28, 4.0),
    "gspo": lambda lp, old, a, m, s: surrogates.gspo(lp - old, a, m, s),
    "gspo_token": lambda lp, old, a, m, s: surrogates.gspo_token(lp - old, a, m, s),
    "gmpo": lambda lp, old, a, m, s: surrogates.gmpo(lp - old, a, m, s),
    "cispo": lambda lp, old, a, m, s: surrogates.cispo(lp, lp - old, a, 0.5, 3.0),
    "sapo": lambda lp, old, a, m, s: surrogates.sapo(lp - old, a),
    "cpgd": lambda lp, old, a, m, s: surrogates.cpgd(lp, old, a, 0.2, 0.2),
    "reinforce": lambda lp, old, a, m, s: surrogates.reinforce(lp, a),
    "importance_weighted": lambda lp, old, a, m, s: surrogates.importance_weighted(lp - old, a),
    "dppo_tv": lambda lp, old, a, m, s: surrogates.dppo_tv(lp, old, a, 0.1, 0.1),
    "dppo_kl": lambda lp, old, a, m, s: surrogates.dppo_kl(lp, old, a, 0.05, 0.05),
    "clip_cov": lambda lp, old, a, m, s: surrogates.clip_cov(lp - old, a, NONE, 0.2, 0.2),
    "kl_cov": lambda lp, old, a, m, s: surrogates.kl_cov(lp - old, a, ~NONE),
    "dro": lambda lp, old, a, m, s: surrogates.dro(lp, lp - old, a, 0.3),
    "dro_sequence": lambda lp, old, a, m, s: surrogates.dro_sequence(lp, lp - old, a, m, s, 0.3),
    "vespo": lambda lp, old, a, m, s: surrogates.vespo(lp, lp - old, a, m, s),
    "topr": lambda lp, old, a, m, s: surrogates.topr(lp, lp - old, a, m, s),
    "dppo_top_k": lambda lp, old, a, m, s: surrogates.dppo_top_k(lp, old, a, (lp.exp() - old.exp()).abs(), 0.1, 0.1),
    "decoupled_ppo": lambda lp, old, a, m, s: surrogates.decoupled_ppo(lp - old, a, torch.ones_like(a), 0.2, 0.2),
}
PENALISED = {"kl_cov", "dro", "dro_sequence"}
every_loss = pytest.mark.parametrize("name", LOSSES)


def batch(seed: int, lengths: tuple[int, ...] = (3, 1, 7, 2, 5)) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, one advantage a sequence, mask, segment ids; the last sequence is masked."""
    numbers = random.Random(seed)
    old = [-numbers.expovariate(0.7) for _ in range(sum(lengths))]
    logprobs = [min(-1e-3, x + numbers.gauss(0, 0.4)) for x in old]
    advantages = [numbers.gauss(0, 1) for _ in lengths]
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = [numbers.random() < 0.8 and i < len(lengths) - 1 for i in ids]
    floats = [torch.tensor(x, dtype=torch.float64) for x in (logprobs, old, [advantages[i] for i in ids])]
    return floats[0], floats[1], floats[2], torch.tensor(mask), torch.tensor(ids)


def gradient(name: str, *inputs: Tensor, weights: Tensor) -> Tensor:
    leaf = inputs[0].clone().requires_grad_()
    aggregation.weighted_sum(weights, LOSSES[name](leaf, *inputs[1:])).backward()
    assert leaf.grad is not None
    return leaf.grad


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name: str, seed: int):
    _, old, advantages, mask, ids = batch(seed)
    weights = aggregation.sequence_mean_token_mean(mask, ids, 5, dtype=torch.float64)
    found = gradient(name, old, old, advantages, mask, ids, weights=weights)
    torch.testing.assert_close(found, -advantages * weights, rtol=1e-12, atol=1e-15)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_float32_agrees_with_float64_and_keeps_its_type(name: str, seed: int):
    logprobs, old, advantages, mask, ids = batch(seed)
    single = LOSSES[name](logprobs.float(), old.float(), advantages.float(), mask, ids)
    double = LOSSES[name](logprobs.float().double(), old.float().double(), advantages.float().double(), mask, ids)
    assert (single.dtype, double.dtype, single.shape) == (torch.float32, torch.float64, logprobs.shape)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-7)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_each_sequence_alone(name: str, seed: int):
    inputs = batch(seed)
    mask, ids = inputs[3], inputs[4]
    leaf = inputs[0].clone().requires_grad_()
    whole = LOSSES[name](leaf, *inputs[1:])
    whole[mask].sum().backward()
    assert leaf.grad is not None
    for i in reversed(range(5)):
        own = ids == i
        part = [x[own] for x in inputs]
        alone = part[0].clone().requires_grad_()
        losses = LOSSES[name](alone, *part[1:4], torch.zeros_like(part[4]))
        losses[part[3]].sum().backward()
        torch.testing.assert_close(losses[part[3]], whole[own & mask], rtol=1e-13, atol=0)
        torch.testing.assert_close(alone.grad, leaf.grad[own], rtol=1e-13, atol=0)


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_neither_order_of_sequences_nor_their_numbers_matter(name: str, seed: int):
    inputs = batch(seed)
    order = torch.cat([(inputs[4] == i).nonzero()[:, 0] for i in (3, 0, 4, 2, 1)])
    numbers = torch.tensor([7, 2, 9, 0, 4])
    moved = [x[order] for x in inputs[:4]]
    found = LOSSES[name](*moved, numbers[inputs[4]][order])  # type: ignore[call-arg]
    torch.testing.assert_close(found, LOSSES[name](*inputs)[order], rtol=1e-13, atol=0)


@every_loss
@pytest.mark.parametrize("log_ratio", [1e3, -1e3, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_extreme_finite_log_ratios_make_no_nan(name: str, log_ratio: float, advantage: float):
    old, advantages = torch.tensor([-1.0, -1.0]), torch.full((2,), advantage)
    logprobs = torch.tensor([log_ratio, -1.0]).requires_grad_()
    losses = LOSSES[name](logprobs, old, advantages, torch.ones(2, dtype=torch.bool), torch.tensor([0, 0]))
    losses.sum().backward()
    assert logprobs.grad is not None
    assert not bool(losses.isnan().any())
    assert not bool(logprobs.grad.isnan().any())


@every_loss
def test_no_advantage_no_loss_and_no_gradient(name: str):
    logprobs, old, advantages, mask, ids = batch(1)
    if name in PENALISED:
        logprobs = old
    zero = torch.zeros_like(advantages)
    assert bool((LOSSES[name](logprobs, old, zero, mask, ids) == 0).all())
    assert bool((gradient(name, logprobs, old, zero, mask, ids, weights=mask.double()) == 0).all())


@every_loss
def test_a_whole_empty_batch_gives_an_empty_loss(name: str):
    empty = torch.zeros(0, dtype=torch.float64)
    mask, ids = empty.bool(), empty.long()
    selected = {"clip_cov": surrogates.clip_cov, "kl_cov": surrogates.kl_cov}
    if name in selected:  # their selection has the batch's length
        bounds = (0.2, 0.2) if name == "clip_cov" else ()
        assert selected[name](empty, empty, mask, *bounds).shape == (0,)  # type: ignore[operator]
    else:
        assert LOSSES[name](empty, empty, empty, mask, ids).shape == (0,)
