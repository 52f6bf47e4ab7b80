"""The trainer of a policy, called by hand: gradients add up, cuts change nothing, mistakes change no weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError, PeerError
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.loops.trainer import Trainer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss

ROWS = [TrainingSample(f"s{i}", (1, *range(2, 3 + i % 3)), 1, 1.0 - i % 2) for i in range(5)]
BATCH = TrainingBatch.of(ROWS)


def likelihood(logprobs: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    return -logprobs.sum() / counts.num_loss_tokens


def weighted(logprobs: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    return -(batch.advantages_T * logprobs).sum() / counts.num_sequences


class Made:
    """A trainer of a table of bigrams, in float64."""

    def __init__(self, size: int = 8, ranks: Any = None, **options: Any) -> None:
        self.policy = BigramPolicy(8, dtype=torch.float64)
        self.progress = Progress()
        loss = PolicyLoss(self.policy, TokenLikelihood())
        self.updater = Updater(
            loss,
            PlainOptimizer([self.policy.table]),
            ranks or OneRank(),
            micro_batching=MicroBatching(size, 0, by_tokens=False),
            learning_rate=lambda update: 0.5 / (1 + update),
        )
        self.trainer = Trainer(self.updater, self.progress, ranks or OneRank(), policy_loss=loss, **options)

    @property
    def table(self) -> Tensor:
        return self.policy.table.detach().clone()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_cut_into_micro_batches_changes_no_number(size: int) -> None:
    made, whole = Made(size), Made()
    for one in (made, whole):
        metrics = [one.trainer.forward_backward(BATCH, weighted), one.trainer.forward_backward(BATCH, likelihood)]
        outcome = one.trainer.step()
        assert outcome.applied
        assert metrics[1]["policy/loss"] == pytest.approx(torch.tensor(8.0).log().item())
    torch.testing.assert_close(made.table, whole.table, rtol=0, atol=1e-15)
    assert outcome.num_micro_batches == 2


def test_gradients_of_batches_add_up_until_the_step() -> None:
    one, both = Made(), Made()
    one.trainer.forward_backward(BATCH, lambda logprobs, batch, counts: 2 * likelihood(logprobs, batch, counts))
    for _ in range(2):
        both.trainer.forward_backward(BATCH, likelihood)
    for made in (one, both):
        made.trainer.step()
    torch.testing.assert_close(one.table, both.table, rtol=0, atol=1e-15)
    assert (both.trainer.updates, both.updater.num_batches) == (1, 0)


def test_a_function_has_the_steps_of_the_objective_of_the_built_in_loop() -> None:
    by_function, by_objective, built_in = Made(2), Made(2), Made(2)
    for _ in range(3):
        by_function.trainer.forward_backward(BATCH, likelihood)
        by_objective.trainer.forward_backward(BATCH, TokenLikelihood())
        built_in.trainer.accumulate(BATCH, MetricTotals())
        rates = [made.trainer.step().learning_rate for made in (by_function, by_objective, built_in)]
    assert rates == [0.5 / 3] * 3
    assert torch.equal(by_objective.table, built_in.table)
    torch.testing.assert_close(by_function.table, built_in.table, rtol=0, atol=1e-15)


def test_the_engine_gets_the_weights_when_they_are_published() -> None:
    versions: list[int] = []
    trainer = Made(load_weights=versions.append).trainer
    assert not trainer.stale
    trainer.forward_backward(BATCH, likelihood)
    assert not trainer.stale, "no weight has changed yet"
    trainer.step()
    assert trainer.stale
    trainer.publish()
    assert not trainer.stale
    trainer.publish(7)
    assert versions == [1, 7]


def test_an_error_in_a_loss_drops_the_gradients_of_its_step() -> None:
    made, clean = Made(1), Made(1)

    def failing(logprobs: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
        if int(batch.token_ids_T[-1]) == 4:
            raise ZeroDivisionError("in the third micro-batch")
        return likelihood(logprobs, batch, counts)

    made.trainer.forward_backward(BATCH, likelihood)
    with pytest.raises(ZeroDivisionError):
        made.trainer.forward_backward(BATCH, failing)
    with pytest.raises(OptionsError, match="no batch has gone forward"):
        made.trainer.step()
    for one in (made, clean):
        one.trainer.forward_backward(BATCH, weighted)
        one.trainer.step()
    assert torch.equal(made.table, clean.table)


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    made = Made()
    made.trainer.forward_backward(BATCH, lambda logprobs, batch, counts: logprobs.sum() * float("nan"))
    outcome = made.trainer.step()
    assert (outcome.applied, made.trainer.stale) == (False, False)
    assert not made.table.any()


def test_a_checkpoint_is_written_between_steps_alone(tmp_path: Path) -> None:
    saved: list[tuple[Path, int]] = []

    def save(directory: Path, updates: int) -> Path:
        saved.append((directory, updates))
        return directory / "step"

    trainer = Made(save=save).trainer
    trainer.forward_backward(BATCH, likelihood)
    with pytest.raises(OptionsError) as caught:
        trainer.save(tmp_path)
    assert caught.value.problem.code == "update.unapplied_gradient"
    trainer.step()
    assert trainer.save(str(tmp_path)) == tmp_path / "step"
    assert saved == [(tmp_path, 1)]


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        (lambda made: made.trainer.step(), "update.no_gradient"),
        (lambda made: made.trainer.forward_backward(TrainingBatch.of([]), likelihood), "batch.empty"),
        (lambda made: made.trainer.save("here"), "update.built_in"),
        (
            lambda made: Trainer(made.updater, made.progress, OneRank()).forward_backward(BATCH, likelihood),
            "update.built_in",
        ),
    ],
)
def test_a_mistake_is_refused_by_name(mistake: Callable[[Made], object], code: str) -> None:
    made = Made()
    with pytest.raises(OptionsError) as caught:
        mistake(made)
    assert caught.value.problem.code == code
    assert not made.table.any()


class OtherRank(OneRank):
    """The first of two ranks; `other` is what the second sends."""

    world_size = 2

    def __init__(self, other: bytes) -> None:
        self.other = other

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.other or data]


def test_batches_that_differ_between_ranks_are_refused() -> None:
    made = Made(ranks=OtherRank(b"another hash"))
    with pytest.raises(PeerError) as caught:
        made.trainer.forward_backward(BATCH, likelihood)
    assert caught.value.problem.code == "batch.differs"
    same = Made(ranks=OtherRank(b""))
    assert json.dumps(same.trainer.forward_backward(BATCH, likelihood))
