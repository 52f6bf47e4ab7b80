"""Losses of preference training as one record: the loss, its numbers, and the terms that are added to it. Torch-free.

Names are those of TRL's `DPOConfig.loss_type`, with `orpo`, `simpo` and `cpo` of its other trainers and `kto` of
responses that are labelled. `rft_algos.objectives.preference_loss` reads the record and calls the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rft_algos.input_checks import check_not_negative, check_positive, check_unit, refuse

PreferenceLossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "ipo_sum",
    "exo_pair",
    "nca_pair",
    "robust",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "orpo",
    "simpo",
    "cpo",
    "kto",
]
"""`ipo` divides log-probs by lengths, as TRL does; `ipo_sum` is the published equation, which OpenRLHF has."""

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"]
"""Divergence of policy and reference that `sigmoid` stays near in; the words of `f_dpo`."""

WITHOUT_REFERENCE: tuple[PreferenceLossType, ...] = ("orpo", "simpo", "cpo")
"""Losses of the policy's log-probs alone."""

SMOOTHED: tuple[PreferenceLossType, ...] = ("sigmoid", "robust", "exo_pair")
"""Losses in which `label_smoothing` stands."""

_BETA: dict[PreferenceLossType, float] = {"simpo": 2.0, "discopop": 0.05}
_EXO_SMOOTHING = 1e-3


# without slots, which hide the defaults that settings take from here
@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of pairs, or of labelled responses (`kto`).

    Example: `PreferenceLoss(loss_type="sigmoid", label_smoothing=0.1)` is conservative DPO.
    """

    loss_type: PreferenceLossType = "sigmoid"
    beta: float | None = None
    """Strength of the pull to the reference (`orpo`: weight of the odds ratio); None = the published number: 2 of
    `simpo`, 0.05 of `discopop`, 0.1 of all others."""
    label_smoothing: float = 0.0
    """Probability that a pair is the wrong way round; `exo_pair` has 0.001 where it is 0."""
    f_divergence: Divergence = "reverse_kl"
    """Divergence of `sigmoid`."""
    f_alpha: float = 0.5
    """alpha of the alpha divergence, in (0, 1)."""
    simpo_gamma: float = 0.5
    """Margin of `simpo`, in units of reward."""
    cpo_alpha: float = 1.0
    """Weight of the likelihood in `cpo`."""
    discopop_tau: float = 0.05
    """Temperature of the blend in `discopop`."""
    desirable_weight: float = 1.0
    """Weight of good responses in `kto`."""
    undesirable_weight: float = 1.0
    """Weight of bad responses in `kto`."""
    reference_free: bool = False
    """Whether the reference is taken to be uniform: log ref(y) = 0."""
    use_weighting: bool = False
    """Whether each pair is weighted by how likely the policy itself would have written it (WPO)."""
    rpo_alpha: float = 0.0
    """Weight of the likelihood of the chosen response, a token, which is added."""

    def __post_init__(self) -> None:
        if self.loss_type not in get_args(PreferenceLossType):
            refuse(f"loss_type must be one of {', '.join(get_args(PreferenceLossType))}, it is {self.loss_type!r}")
        check_positive(beta=self.strength, discopop_tau=self.discopop_tau)
        check_not_negative(rpo_alpha=self.rpo_alpha, cpo_alpha=self.cpo_alpha, simpo_gamma=self.simpo_gamma)
        check_not_negative(desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)
        check_unit(label_smoothing=self.label_smoothing)

    @property
    def strength(self) -> float:
        """Return beta, or the published number of the loss."""
        return _BETA.get(self.loss_type, 0.1) if self.beta is None else self.beta

    @property
    def smoothing(self) -> float:
        """Return the label smoothing; of `exo_pair` the number that stands for 0, whose label is infinitely far."""
        return self.label_smoothing or (_EXO_SMOOTHING if self.loss_type == "exo_pair" else 0.0)

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with a reference policy."""
        return not self.reference_free and self.loss_type not in WITHOUT_REFERENCE

    @property
    def is_labelled(self) -> bool:
        """Return whether the loss is of responses by themselves, and not of pairs."""
        return self.loss_type == "kto"
