"""Loss of a model that scores the steps of a response, each of which is labelled good or bad."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rft_algos.packed.tensor_checks import check_vectors


def step_cross_entropy(logits_N: Tensor, labels_N: Tensor) -> Tensor:
    """Binary cross-entropy of each step's score: l = -y log sigmoid(s) - (1 - y) log sigmoid(-s).

    sigmoid(s) is the probability that the step, and all before it, are right. As an equation it is the
    cross-entropy over the two classes of a token classifier whose logits differ by s.

    Sources: Uesato et al. 2022, "Solving math word problems with process- and outcome-based feedback"
    (arXiv 2211.14275), section 2.4; Lightman et al. 2023, "Let's verify step by step" (arXiv 2305.20050),
    section 2.6; soft labels as in Wang et al. 2024, "Math-Shepherd" (arXiv 2312.08935), equation 2.

    Args:
        logits_N: [N] scores s of the steps of all responses; the gradient flows through them.
        labels_N: [N] y in [0, 1]: 1 a good step, 0 a bad one, between them the probability that it is good.

    Returns:
        [N] loss per step, in nats, unreduced.
    """
    check_vectors(logits_N=logits_N, labels_N=labels_N)
    return -labels_N * logsigmoid(logits_N) - (1 - labels_N) * logsigmoid(-logits_N)
