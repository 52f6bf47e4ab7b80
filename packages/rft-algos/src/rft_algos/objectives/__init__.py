"""Objectives: advantages and loss of an algorithm record, the only place that dispatches on its components.

`compute_advantages` gives every token of a whole batch its advantage and weight, before any cut into
micro-batches; `policy_loss` and `supervised_loss` give the share of the step's loss that the tokens
of one micro-batch carry. `register_equation` joins an equation to a choice.
"""

from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.objectives import advantage_equations as advantage_equations  # joins its equations to the choices
from rft_algos.objectives.advantages import AdvantageOutput, RolloutBatch, algorithm_advantages, compute_advantages
from rft_algos.objectives.padded_loss import PaddedBatch, padded_loss
from rft_algos.objectives.policy_loss import Coefficients, LossOutput, Metrics, is_by_token, policy_loss, token_losses
from rft_algos.objectives.supervised_loss import VocabularyTerms, supervised_loss
from rft_algos.objectives.token_weights import token_weights
from rft_algos.packed.loss_tokens import Tokens

__all__ = [
    "AdvantageOutput",
    "Coefficients",
    "LossOutput",
    "Metrics",
    "PaddedBatch",
    "RolloutBatch",
    "Tokens",
    "VocabularyTerms",
    "algorithm_advantages",
    "compute_advantages",
    "is_by_token",
    "padded_loss",
    "policy_loss",
    "register_clip_mask",
    "register_equation",
    "supervised_loss",
    "token_losses",
    "token_weights",
]
