"""Supervised fine-tuning: the loss of tokens that someone else wrote."""

from __future__ import annotations

from torch import Tensor


def negative_log_likelihood(logprobs_T: Tensor) -> Tensor:
    """l_t = -log pi(token_t | earlier tokens): cross-entropy against the token that is there.

    Reduce it with `rft_algos.reductions`; `objectives.supervised_loss` does both.

    Args:
        logprobs_T: [T] log-probs of the tokens, in nats; the gradient flows through them.

    Returns:
        [T] loss per token, in nats.
    """
    return -logprobs_T
