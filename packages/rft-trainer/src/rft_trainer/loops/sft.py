"""Supervised fine-tuning: the likelihood of demonstrations, as a loss and on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.objectives import LossOutput, supervised_loss, token_weights
from rft_core.fault_points import declare
from rft_trainer.batches.packing import filler_batches, pack, rank_micro_batches
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.units import split_in_order
from rft_trainer.loops.supervised_loop import HeldOutResult, SupervisedLoop
from rft_trainer.protocols import Collectives, Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.supervised_loss import denominator

POINT_LOGGED = declare("sft.logged", "the row of a step is written, its checkpoint is not")


class TokenLikelihood:
    """Mean negative log-likelihood of the response tokens over the whole optimizer step.

    Where rows have weights r, the mean is sum_t r_t l_t / sum_t r_t over all response tokens t of the step.
    """

    needs_entropy = False
    logs_entropy = False
    by_token = True

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Take any samples: the likelihood needs no log-probs but the policy's."""

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function (log-probs [N], entropies [N], token indices [N]) -> their shares [N] of the loss."""
        weights_T = token_weights(
            Sft(),
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=denominator(counts),
            num_sequences=counts.num_sequences,
            dtype=torch.float64,
        )
        row_weights_T = batch.row_weights_T
        if row_weights_T is not None:
            weights_T = weights_T * row_weights_T
        return lambda logprobs_N, entropy_N, tokens_N: -weights_T[tokens_N].to(logprobs_N.dtype) * logprobs_N

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the SFT loss of a micro-batch with the denominators of the whole optimizer step."""
        return supervised_loss(
            Sft(),
            logprobs_T=logprobs_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=denominator(counts),
            num_sequences=counts.num_sequences,
            row_weights_T=batch.row_weights_T,
        )


@torch.no_grad()
def mean_loss(
    policy: Policy,
    samples: Sequence[TrainingSample],
    collectives: Collectives,
    *,
    max_sequences: int,
    max_tokens: int,
    device: str = "cpu",
    collective_forward: bool = False,
) -> float:
    """Compute the mean negative log-likelihood a response token over `samples`, in nats, over all ranks.

    `collective_forward`: every forward is a collective operation, so all ranks must run equally many.
    """

    def cut(num_tokens: Sequence[int]) -> list[list[int]]:
        return split_in_order(num_tokens, max_sequences, max_tokens)

    own = [
        pack(chosen, device) for chosen in rank_micro_batches(samples, collectives.rank, collectives.world_size, cut)
    ]
    idle = filler_batches(samples, collectives, cut, device) if collective_forward else []
    total = torch.zeros(2, dtype=torch.float64)
    for number, batch in enumerate([*own, *idle]):
        logprobs_T, _ = policy.token_logprobs(batch.tokens)
        if number < len(own):  # filler batches only match the other ranks' collectives
            total += torch.stack([-logprobs_T.double().sum(), batch.loss_mask_T.sum().double()]).cpu()
    summed, num_tokens = collectives.sum(total).tolist()
    return summed / num_tokens if num_tokens else math.nan


def loss_metrics(
    samples: Sequence[TrainingSample], sets: Sequence[str], loss_of: Callable[[Sequence[TrainingSample]], float]
) -> dict[str, float]:
    """Compute the held-out losses as metrics: of all rows together, and of each set where there are several.

    The loss of all is the mean over all learned tokens, sum_s T_s l_s / sum_s T_s for sets of T_s tokens and losses
    l_s, so a set counts by its tokens.

    Args:
        samples: the held-out rows.
        sets: the set of each row, where there are several; else empty.
        loss_of: computes the mean loss a learned token of some of the rows, in nats.
    """
    if not sets:
        return {"eval/loss": loss_of(samples)}
    total, num_tokens, losses = 0.0, 0, dict[str, float]()
    for name in dict.fromkeys(sets):
        own = [sample for sample, of in zip(samples, sets, strict=True) if of == name]
        count = sum(sample.num_loss_tokens for sample in own)
        loss = losses[f"eval/{name}/loss"] = loss_of(own)
        total, num_tokens = total + loss * count, num_tokens + count
    return {"eval/loss": total / num_tokens, **losses}


@dataclass(slots=True, kw_only=True)
class SftLoop(SupervisedLoop[Sequence[TrainingSample]]):
    """The supervised fine-tuning loop of a run, with its collaborators as fields."""

    samples: Sequence[TrainingSample]
    held_out: Sequence[TrainingSample]
    held_out_sets: Sequence[str] = ()
    """The set of each held-out row, where there are several."""
    policy: Policy
    eval_max_sequences: int
    eval_max_tokens: int
    device: str = "cpu"
    data_ranks: Collectives | None = None
    """The ranks over which samples are sharded; None = `collectives`."""
    collective_forward: bool = False
    """Whether every forward is a collective operation, so that all ranks must run equally many."""

    @property
    def logged_point(self) -> str:
        """The fault point of supervised runs."""
        return POINT_LOGGED

    def _data(self, entries: Sequence[LedgerEntry]) -> Sequence[TrainingSample]:
        return [self.samples[entry.prompt_index] for entry in entries]

    def _samples(self, data: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        return data

    def _measure(self) -> HeldOutResult | None:
        """Compute the mean loss of the held-out rows and of each of several sets, in nats a response token."""
        if not self.held_out:
            return None
        metrics = loss_metrics(self.held_out, self.held_out_sets, self._mean_loss)
        return HeldOutResult(metrics["eval/loss"], metrics)

    def _mean_loss(self, samples: Sequence[TrainingSample]) -> float:
        return mean_loss(
            self.policy,
            samples,
            self.data_ranks or self.collectives,
            max_sequences=self.eval_max_sequences,
            max_tokens=self.eval_max_tokens,
            device=self.device,
            collective_forward=self.collective_forward,
        )
