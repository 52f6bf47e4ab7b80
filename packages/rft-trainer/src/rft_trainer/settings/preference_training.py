"""Preference training: its rows, its loss, its epochs. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft_algos.algorithms.preference import Divergence, PreferenceLoss, PreferenceLossType
from rft_trainer.settings.data import HeldOutColumnSettings, HeldOutSettings, StoredRowsSettings
from rft_trainer.settings.sft import SequenceTrainingSettings


@dataclass(frozen=True, kw_only=True)
class PreferenceDataSettings(HeldOutColumnSettings, HeldOutSettings, StoredRowsSettings):
    """Preference pairs, or labelled responses, to train on and to evaluate on."""

    chosen_key: str = "chosen"
    """Column that holds the better response (text, or messages whose last one it is)."""

    rejected_key: str = "rejected"
    """Column that holds the worse response."""

    weight_key: str = ""
    """Column that holds the weight of a row in the loss; empty = all rows weigh the same."""

    margin_key: str = ""
    """Column that says by how much the better response is better, in units of reward (with `loss_type` sigmoid);
    empty = no margin."""

    completion_key: str = "completion"
    """Column that holds a labelled response (with `loss_type` kto, whose rows may also be pairs)."""

    label_key: str = "label"
    """Column that says whether a labelled response is good (with `loss_type` kto)."""

    held_out_rows: int = field(default=0, metadata={"minimum": 0})
    """Training rows, chosen by the seed, that are kept out of training and evaluated; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLossSettings:
    """The loss, under the names of TRL."""

    loss_type: PreferenceLossType = PreferenceLoss.loss_type
    """Loss: sigmoid (DPO), ipo (a token, as in TRL) or ipo_sum (as published), hinge, robust, exo_pair, nca_pair,
    bco_pair, sppo_hard, aot and aot_unpaired (sort the pairs of a micro-batch), apo_zero, apo_down, discopop; orpo,
    simpo and cpo need no reference; kto takes labelled responses."""

    loss_weights: str = ""
    """Several losses of pairs, added up, each NAME=WEIGHT (sigmoid=0.8,bco_pair=0.2; `loss_type` is one of them);
    empty = loss_type alone."""

    reference_pretrain: str = ""
    """Reference model: a directory or ORG/NAME[@REVISION], with the tokenizer of the policy; empty = the policy as the
    run begins."""

    beta: float | None = field(default=PreferenceLoss.beta, metadata={"above": 0.0})
    """Strength of the pull to the reference; none = the published number of the loss (simpo 2, discopop 0.05, all
    others 0.1)."""

    label_smoothing: float = field(default=PreferenceLoss.label_smoothing, metadata={"minimum": 0.0, "below": 0.5})
    """Probability that a pair is the wrong way round (with `loss_type` sigmoid: cDPO; robust; exo_pair;
    aot; aot_unpaired)."""

    reference_free: bool = PreferenceLoss.reference_free
    """Compare with no reference policy: the log-probs of the reference are taken to be 0."""

    f_divergence: Divergence = PreferenceLoss.f_divergence
    """Divergence that keeps the policy near the reference (with `loss_type` sigmoid)."""

    f_alpha: float = field(default=PreferenceLoss.f_alpha, metadata={"above": 0.0, "below": 1.0})
    """Exponent of the alpha divergence (with `f_divergence` alpha)."""

    simpo_gamma: float = field(default=PreferenceLoss.simpo_gamma, metadata={"minimum": 0.0})
    """Margin by which the chosen response should win, in units of reward (with `loss_type` simpo)."""

    cpo_alpha: float = field(default=PreferenceLoss.cpo_alpha, metadata={"minimum": 0.0})
    """Weight of the likelihood of the chosen response (with `loss_type` cpo)."""

    discopop_tau: float = field(default=PreferenceLoss.discopop_tau, metadata={"above": 0.0})
    """Temperature of the blend of losses (with `loss_type` discopop)."""

    desirable_weight: float = field(default=PreferenceLoss.desirable_weight, metadata={"minimum": 0.0})
    """Weight of good responses (with `loss_type` kto)."""

    undesirable_weight: float = field(default=PreferenceLoss.undesirable_weight, metadata={"minimum": 0.0})
    """Weight of bad responses (with `loss_type` kto)."""

    ld_alpha: float = field(default=1.0, metadata={"minimum": 0.0, "maximum": 1.0})
    """Weight of the tokens by which a response is longer than the other one of its pair (LD-DPO); 1 = that of all."""

    use_weighting: bool = PreferenceLoss.use_weighting
    """Weight each pair by how likely the policy itself would have written it (WPO)."""

    rpo_alpha: float = field(default=PreferenceLoss.rpo_alpha, metadata={"minimum": 0.0})
    """Weight of the likelihood of the chosen response, a token, which is added to the loss; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainingSettings(SequenceTrainingSettings):
    """Epochs, batch sizes and early stopping of preference training."""

    learning_rate: float = field(default=1e-6, metadata={"above": 0.0})
    """Peak learning rate."""

    max_epochs: int = field(default=1, metadata={"minimum": 1})
    """Passes over the training rows."""

    train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Pairs (of `loss_type` kto: responses) in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=4, metadata={"minimum": 1})
    """Pairs (of `loss_type` kto: responses) in one forward and backward pass of a rank."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Maximum length of a prompt with one response, in tokens; pairs with a longer one are left out and counted; none =
    what the model can take."""

    min_improvement: float = field(default=0.0, metadata={"minimum": 0.0})
    """Fall of the held-out loss that counts as better (with `patience`)."""

    target_loss: float = field(default=0.0, metadata={"minimum": 0.0})
    """Held-out loss at which the run ends; 0 = at none."""
