"""Losses of preference training from their record: one loss a pair or a labelled response, unreduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from rft_algos.algorithms.preference import PreferenceLoss, PreferenceLossType
from rft_algos.input_checks import refuse
from rft_algos.losses import preference, preference_variants
from rft_algos.losses.preference import mean_logprobs
from rft_algos.losses.preference_variants import Pairs, wpo_weights

_ROUNDING = 2e-6
"""Relative rounding of sums of float32 log-probs that are computed in other batches."""


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probs of pairs, with the lengths of their responses."""

    pairs: Pairs
    """[B] each, summed over the tokens of a response; the reference's are 0 where there is none."""
    chosen_lengths_B: Tensor
    """[B] |c|, in tokens."""
    rejected_lengths_B: Tensor
    """[B] |r|."""
    margins_B: Tensor | None = None
    """[B] by how much each chosen response should be better, in units of reward (`sigmoid`); None for 0."""

    @property
    def mean_chosen_B(self) -> Tensor:
        """Return log pi(c) / |c|, [B]."""
        return mean_logprobs(self.pairs.policy_chosen_B, self.chosen_lengths_B)

    @property
    def mean_rejected_B(self) -> Tensor:
        """Return log pi(r) / |r|, [B]."""
        return mean_logprobs(self.pairs.policy_rejected_B, self.rejected_lengths_B)


def pair_losses(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    """Compute the loss of every pair: w * l + rpo_alpha * (-log pi(c) / |c|), [B].

    l is the loss of `config.loss_type`, or the weighted sum of those of `config.loss_weights` (mixed preference
    optimisation, Wang et al. 2024, arXiv 2411.10442, equation 1), and w the weight of WPO, or 1. The likelihood that is
    added is that of Pang et al. 2024, "Iterative reasoning preference optimization" (arXiv 2404.19733), equation 1.
    """
    losses_B = sum(weight * _losses_of(part, of) for weight, part in config.parts)
    assert isinstance(losses_B, Tensor)  # there is one part at least
    if config.use_weighting:
        losses_B = losses_B * wpo_weights(of.mean_chosen_B, of.mean_rejected_B)
    if config.rpo_alpha:
        losses_B = losses_B - config.rpo_alpha * of.mean_chosen_B
    return losses_B


def _losses_of(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    equation = _EQUATIONS.get(config.loss_type)
    if equation is None:
        refuse(f"{config.loss_type} is no loss of pairs; those are {', '.join(_EQUATIONS)}")
    return equation(config, of)


def implicit_rewards(config: PreferenceLoss, of: PairLogprobs) -> tuple[Tensor, Tensor]:
    """Compute the rewards of chosen and rejected responses that the loss compares, [B] each, without gradient.

    beta (log pi(y) - log ref(y)); without a reference beta log pi(y); of `simpo` and `orpo`, which compare responses a
    token, beta log pi(y) / |y|. Up to a constant of the prompt.
    """
    with torch.no_grad():
        if config.loss_type in ("simpo", "orpo"):
            return config.strength * of.mean_chosen_B, config.strength * of.mean_rejected_B
        return config.strength * of.pairs.chosen_B, config.strength * of.pairs.rejected_B


def in_order(first_B: Tensor, second_B: Tensor, scale_B: Tensor) -> Tensor:
    """Compare rewards: 1 where the first is higher, 0 where the second is, one half for a tie, [B].

    Rewards within rounding are a tie: no further apart than 2e-6 of `scale_B` [B], the sum of the magnitudes that they
    are differences of. At the start of a run, where policy and reference are the same, all pairs are ties.
    """
    apart_B = first_B - second_B
    tie_B = apart_B.abs() <= _ROUNDING * scale_B
    return torch.where(tie_B, 0.5, (apart_B > 0).to(apart_B.dtype))


def pairs_in_order(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    """Return `in_order` of the rewards of chosen and rejected responses, [B], without gradient."""
    chosen_B, rejected_B = implicit_rewards(config, of)
    scale_B = config.strength * (of.pairs.policy_chosen_B.abs() + of.pairs.policy_rejected_B.abs()).detach()
    return in_order(chosen_B, rejected_B, scale_B)


def labelled_losses(
    config: PreferenceLoss, policy_B: Tensor, reference_B: Tensor, desirable_B: Tensor, reference_point: float | Tensor
) -> Tensor:
    """Compute the loss of every labelled response, [B]; arguments as of `rft_algos.losses.preference.kto`."""
    return preference.kto(
        policy_B,
        reference_B,
        desirable_B,
        reference_point,
        beta=config.strength,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )


def _of_ratios(equation: Callable[..., Tensor]) -> Callable[[PreferenceLoss, PairLogprobs], Tensor]:
    """Return the loss of an equation that takes the log-ratios of pairs, and beta alone."""
    return lambda config, of: equation(of.pairs, beta=config.strength)


def _sigmoid(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    if config.f_divergence == "reverse_kl":
        margin = 0.0 if of.margins_B is None else of.margins_B
        return preference.dpo(*_four(of.pairs), beta=config.strength, label_smoothing=config.smoothing, margin=margin)
    return preference_variants.f_dpo(
        of.pairs, beta=config.strength, divergence=config.f_divergence, alpha=config.f_alpha
    )


def _ipo(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    lengths = of.chosen_lengths_B, of.rejected_lengths_B
    return preference.ipo_per_token(*_four(of.pairs), *lengths, beta=config.strength)


def _ipo_sum(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference.ipo(*_four(of.pairs), beta=config.strength)


def _exo(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.exo(of.pairs, beta=config.strength, label_smoothing=config.smoothing)


def _bco(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    # a shift of 0, as TRL has it for pairs: a running mean would be a state of the run
    return preference_variants.bco(of.pairs, 0.0, beta=config.strength)


def _aot(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.aot_paired(of.pairs, beta=config.strength, label_smoothing=config.smoothing)


def _aot_unpaired(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.aot_unpaired(of.pairs, beta=config.strength, label_smoothing=config.smoothing)


def _robust(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.robust_dpo(of.pairs, beta=config.strength, label_noise=config.smoothing)


def _discopop(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.discopop(of.pairs, beta=config.strength, temperature=config.discopop_tau)


def _orpo(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference.orpo(*_two(of), of.chosen_lengths_B, of.rejected_lengths_B, coefficient=config.strength)


def _simpo(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    lengths = of.chosen_lengths_B, of.rejected_lengths_B
    return preference.simpo(*_two(of), *lengths, beta=config.strength, gamma=config.simpo_gamma)


def _cpo(config: PreferenceLoss, of: PairLogprobs) -> Tensor:
    return preference_variants.cpo(*_two(of), beta=config.strength, coefficient=config.cpo_alpha)


def _two(of: PairLogprobs) -> tuple[Tensor, Tensor]:
    return of.pairs.policy_chosen_B, of.pairs.policy_rejected_B


def _four(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pairs.policy_chosen_B, pairs.policy_rejected_B, pairs.reference_chosen_B, pairs.reference_rejected_B


_EQUATIONS: dict[PreferenceLossType, Callable[[PreferenceLoss, PairLogprobs], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _of_ratios(preference_variants.hinge),
    "ipo": _ipo,
    "ipo_sum": _ipo_sum,
    "exo_pair": _exo,
    "nca_pair": _of_ratios(preference_variants.nca),
    "robust": _robust,
    "bco_pair": _bco,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "sppo_hard": _of_ratios(preference_variants.sppo),
    "apo_zero": _of_ratios(preference_variants.apo_zero),
    "apo_down": _of_ratios(preference_variants.apo_down),
    "discopop": _discopop,
    "orpo": _orpo,
    "simpo": _simpo,
    "cpo": _cpo,
}
assert {*_EQUATIONS, "kto"} == {*get_args(PreferenceLossType)}
