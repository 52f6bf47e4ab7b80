"""Losses of preference training as one record: the loss, its numbers, and the terms that are added to it. Torch-free.

Names are those of TRL's `DPOConfig.loss_type`, with `orpo`, `simpo` and `cpo` of its other trainers and `kto` of
responses that are labelled. `rft_algos.objectives.preference_loss` reads the record and calls the equations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
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

SMOOTHED: tuple[PreferenceLossType, ...] = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
"""Losses in which `label_smoothing` stands."""

SORTED: tuple[PreferenceLossType, ...] = ("aot", "aot_unpaired")
"""Losses that sort the pairs of a micro-batch: the losses of its quantiles belong to no single pair."""

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
    loss_weights: tuple[tuple[PreferenceLossType, float], ...] = ()
    """Several losses of pairs with their weights, `loss_type` among them, in the place of `loss_type` alone (MPO)."""

    def __post_init__(self) -> None:
        for name in (self.loss_type, *(name for name, _ in self.loss_weights)):
            if name not in get_args(PreferenceLossType):
                refuse(f"loss_type must be one of {', '.join(get_args(PreferenceLossType))}, it is {name!r}")
        if self.loss_weights and self.loss_type not in self.loss_types:
            refuse(f"loss_weights must have {self.loss_type}, the loss_type; they have {', '.join(self.loss_types)}")
        if len({*self.loss_types}) < len(self.loss_types):
            refuse(f"a loss has one weight; loss_weights are of {', '.join(self.loss_types)}")
        if self.loss_weights and "kto" in self.loss_types:
            refuse("kto is no loss of pairs, which loss_weights add up")
        for name, weight in self.loss_weights:
            check_positive(**{name: weight})
        check_positive(beta=self.strength, discopop_tau=self.discopop_tau)
        check_not_negative(rpo_alpha=self.rpo_alpha, cpo_alpha=self.cpo_alpha, simpo_gamma=self.simpo_gamma)
        check_not_negative(desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)
        check_unit(label_smoothing=self.label_smoothing)

    @property
    def strength(self) -> float:
        """Return beta, or the published number of the loss."""
        return _BETA.get(self.loss_type, 0.1) if self.beta is None else self.beta

    @property
    def loss_types(self) -> tuple[PreferenceLossType, ...]:
        """Return the losses that are added up: `loss_type` alone, or those of `loss_weights`."""
        return tuple(name for name, _ in self.loss_weights) or (self.loss_type,)

    @property
    def parts(self) -> tuple[tuple[float, PreferenceLoss], ...]:
        """Return (weight, loss alone) of every loss; beta is the published number of each where none is given."""
        if not self.loss_weights:
            return ((1.0, self),)
        return tuple((weight, replace(self, loss_type=name, loss_weights=())) for name, weight in self.loss_weights)

    @property
    def smoothing(self) -> float:
        """Return the label smoothing; of `exo_pair` the number that stands for 0, whose label is infinitely far."""
        return self.label_smoothing or (_EXO_SMOOTHING if self.loss_type == "exo_pair" else 0.0)

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with a reference policy."""
        return not self.reference_free and not {*self.loss_types} <= {*WITHOUT_REFERENCE}

    @property
    def is_labelled(self) -> bool:
        """Return whether the loss is of responses by themselves, and not of pairs."""
        return self.loss_type == "kto"


def weighted_losses(text: str) -> tuple[tuple[PreferenceLossType, float], ...]:
    """Parse `sigmoid=0.8,bco_pair=0.2`, several losses with their weights; none for an empty text."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    found: list[tuple[PreferenceLossType, float]] = []
    for name, _, number in pairs:
        known = next((each for each in get_args(PreferenceLossType) if each == name.strip()), None)
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if known is None or not weight > 0:
            refuse(
                f"loss_weights has {name}={number}",
                why=f"each part is NAME=WEIGHT, a weight above 0 of {', '.join(get_args(PreferenceLossType))}",
                do="--loss_weights sigmoid=0.8,bco_pair=0.2",
            )
        found.append((known, weight))
    return tuple(found)
