"""One reward of a response from the scores of its steps."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import logsigmoid

from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_vectors

StepReduction = Literal["min", "product", "mean", "last"]


def step_reward(logits_J: Tensor, reduction: StepReduction) -> Tensor:
    """Reduce the scores of a response's steps to one reward: a function of p_j = sigmoid(s_j).

    min      the smallest p_j: a response is as good as its worst step
    product  prod_j p_j: the probability that all steps are right, were they independent; it falls with their number
    mean     (1 / J) sum_j p_j
    last     p_J, where a score is of a step and all before it

    Sources: Lightman et al. 2023 (arXiv 2305.20050), section 2.6 (product) and appendix F (min); Wang et al. 2024,
    "Math-Shepherd" (arXiv 2312.08935), section 3.4 (min); Uesato et al. 2022 (arXiv 2211.14275) for the last step.

    Args:
        logits_J: [J] scores s_j of the steps of one response, in order; at least one.
        reduction: which of them.

    Returns:
        [] reward in [0, 1]; the gradient flows to the scores.
    """
    check_vectors(logits_J=logits_J)
    if not logits_J.numel():
        refuse("logits_J is empty", why="a response without steps has no reward")
    if reduction == "product":
        # added as logarithms, so that many steps do not underflow before the last
        return logsigmoid(logits_J).sum().exp()
    if reduction == "mean":
        return logits_J.sigmoid().mean()
    if reduction == "last":
        return logits_J[-1].sigmoid()
    if reduction != "min":
        refuse(f"reduction must be one of {', '.join(get_args(StepReduction))}, it is {reduction!r}")
    return logits_J.min().sigmoid()
