"""The loss of demonstrations with terms over the vocabulary and with weights of rows, by hand and in any cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.packing import count, pack
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TrainingSample
from rft_trainer.update.supervised_loss import SupervisedLoss, denominator

SAMPLES = [
    TrainingSample("a", (0, 1, 2), 1, 0.0, weight=3.0),
    TrainingSample("b", (2, 1, 0, 1), 2, 0.0, weight=0.5),
    TrainingSample("c", (1, 0), 1, 0.0),
]


class Alone:
    """A rank that meets nobody."""

    rank, world_size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class Table:
    """A policy whose logits at a token are a row of a matrix: that of the token before it."""

    def __init__(self) -> None:
        values = [[0.3, -0.2, 1.1], [0.0, 2.0, -1.0], [0.5, 0.4, 0.1]]
        self.logits_VV = torch.tensor(values, dtype=torch.float64, requires_grad=True)

    def vocabulary_terms(self, tokens: PackedTokens, *, with_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        before_T = tokens.token_ids_T.roll(1)
        rows_TV = torch.log_softmax(self.logits_VV[before_T], 1)
        logprobs_T = rows_TV.gather(1, tokens.token_ids_T[:, None])[:, 0]
        log_z_T = self.logits_VV[before_T].logsumexp(1)
        kept_T = tokens.targets_T
        parts = (logprobs_T, log_z_T, rows_TV.mean(1))
        logprobs_T, log_z_T, mean_T = (torch.where(kept_T, part, 0.0) for part in parts)
        return logprobs_T, log_z_T, mean_T if with_mean else None

    def token_logprobs(self, tokens: PackedTokens, **_: object) -> tuple[Tensor, None]:
        return self.vocabulary_terms(tokens, with_mean=False)[0], None


def step(record: Sft, cuts: list[list[TrainingSample]]) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient, metrics) of one optimizer step whose samples come in these micro-batches."""
    policy, totals, total = Table(), MetricTotals(), 0.0
    loss = SupervisedLoss(policy, record)
    counts = count([sample for cut in cuts for sample in cut])
    for cut in cuts:
        output = loss(pack(cut), counts, totals)
        output.loss.backward()
        total += float(output.loss)
    assert policy.logits_VV.grad is not None
    return total, policy.logits_VV.grad, totals.merged(Alone())


def test_all_terms_are_what_they_are_by_hand() -> None:
    logits = Table().logits_VV.detach()
    expected, weights = 0.0, 0.0
    for sample in SAMPLES:
        for place in range(sample.prompt_length, sample.num_tokens):
            row = logits[sample.token_ids[place - 1]].tolist()
            log_z = math.log(sum(map(math.exp, row)))
            logprobs = [value - log_z for value in row]
            smoothed = -0.9 * logprobs[sample.token_ids[place]] - 0.1 * sum(logprobs) / 3
            expected += sample.weight * (smoothed + 0.2 * log_z**2)
            weights += sample.weight
    assert weights == denominator(count(SAMPLES)) == 3.0 * 2 + 0.5 * 2 + 1.0
    loss, _, metrics = step(Sft(label_smoothing=0.1, z_loss_coef=0.2), [SAMPLES])
    assert loss == pytest.approx(expected / weights, rel=1e-12)
    assert metrics["sft/loss"] == pytest.approx(expected / weights, rel=1e-12)


@pytest.mark.parametrize("record", [Sft(), Sft(label_smoothing=0.3), Sft(label_smoothing=0.1, z_loss_coef=0.2)])
def test_no_cut_of_a_step_changes_it(record: Sft) -> None:
    loss, gradient, metrics = step(record, [SAMPLES])
    cut_loss, cut_gradient, cut_metrics = step(record, [[sample] for sample in SAMPLES])
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(cut_gradient, gradient, rtol=1e-12, atol=0)
    assert cut_metrics == pytest.approx(metrics, rel=1e-12)


def test_weights_act_alike_in_the_split_and_in_the_fused_loss() -> None:
    batch, counts, policy = pack(SAMPLES), count(SAMPLES), Table()
    logprobs_T, _ = policy.token_logprobs(batch.tokens)
    tokens_N = batch.loss_mask_T.nonzero()[:, 0]
    fused_N = TokenLikelihood().token_losses(batch, counts)(logprobs_T[tokens_N], logprobs_T[tokens_N], tokens_N)
    split = TokenLikelihood()(batch, logprobs_T, None, counts).loss
    assert float(fused_N.sum()) == pytest.approx(float(split), rel=1e-12)
    assert float(split) == pytest.approx(step(Sft(), [SAMPLES])[0], rel=1e-12)


def test_a_weight_of_all_rows_alike_changes_nothing() -> None:
    plain = [TrainingSample(sample.sample_id, sample.token_ids, sample.prompt_length, 0.0) for sample in SAMPLES]
    doubled = [
        TrainingSample(sample.sample_id, sample.token_ids, sample.prompt_length, 0.0, weight=2.0) for sample in SAMPLES
    ]
    assert count(plain).loss_weight is None
    assert pack(plain).row_weights_S is None
    assert step(Sft(), [plain])[0] == pytest.approx(step(Sft(), [doubled])[0], rel=1e-12)


def test_the_filler_of_other_ranks_has_a_gradient_of_every_term() -> None:
    policy = Table()
    loss = SupervisedLoss(policy, Sft(label_smoothing=0.1))
    (loss.filler(pack(SAMPLES)) * 0.0).backward()
    assert policy.logits_VV.grad is not None
    assert not policy.logits_VV.grad.any()
    loss.whole_step(SAMPLES, Counts(1, 1), MetricTotals())
    with pytest.raises(AssertionError):
        loss.begin([], [])
