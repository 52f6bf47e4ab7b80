"""The trainer of a policy: gradients of batches, optimizer steps, and new weights for the engine.

The built-in loops call it, and so does a loop of one's own:

    forward_backward   the gradient of a loss on a batch, added up
    step               the weights change once, by all gradients since the last step
    publish            the engine samples from the new weights
    save               a checkpoint
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft_core.errors import OptionsError, PeerError
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.update.function_objective import FunctionObjective, LossFunction
from rft_trainer.update.optimizer_step import MicroBatchLoss, StepMonitor, UpdateOutcome, Updater
from rft_trainer.update.policy_loss import Objective, PolicyLoss


class Trainer:
    """Trainer of one policy; every rank calls its methods in the same order.

    Example::

        trainer.forward_backward(batch, lambda logprobs, batch, counts: -logprobs.sum() / counts.num_loss_tokens)
        outcome = trainer.step()        # gradient_norm, learning_rate, applied
        trainer.publish()
    """

    def __init__(
        self,
        updater: Updater,
        progress: Progress,
        collectives: Collectives,
        *,
        policy_loss: PolicyLoss | None = None,
        load_weights: Callable[[int], None] | None = None,
        save: Callable[[Path, int], Path] | None = None,
        end_step: Callable[[UpdateOutcome], None] | None = None,
    ) -> None:
        """Store the collaborators.

        Args:
            updater: accumulates and steps.
            progress: counts the updates; the learning rate follows its number.
            collectives: all ranks.
            policy_loss: the forward of the policy, which `forward_backward` gives the loss of a call; None = every
                batch has the updater's own loss.
            load_weights: gives the engine the present weights under a version; None = there is no engine.
            save: writes a checkpoint of so many updates below a directory and returns its path; None = it is saved
                elsewhere.
            end_step: called with the outcome of every step.
        """
        self._updater = updater
        self._progress = progress
        self._collectives = collectives
        self._policy_loss = policy_loss
        self._load_weights = load_weights
        self._save = save
        self._end_step = end_step
        self._changed = False

    @property
    def updates(self) -> int:
        """Optimizer steps so far, those of an earlier part of the training included."""
        return self._progress.updates

    @property
    def stale(self) -> bool:
        """Return whether the weights have changed since the engine got them."""
        return self._changed

    def forward_backward(self, batch: TrainingBatch, loss: LossFunction | Objective) -> dict[str, float]:
        """Add the gradient of `loss` on `batch` to that of the next step; return the metrics of the batch.

        The batch is divided among the ranks and cut into micro-batches, which changes no number: `loss` is called
        on each with the counts of the whole batch, and the shares that it returns are added up. Called again before
        `step`, the gradients of both batches are added.

        Args:
            batch: the same on every rank.
            loss: a function as `LossFunction` describes, or an objective of the library (`rft.objective`).

        Returns:
            Mean of each metric over the batch, on every rank; `policy/loss` is the loss itself (`sft/loss` of the
            objective of demonstrations).

        Raises:
            OptionsError: the batch is empty or lacks log-probs that the objective needs, or the loss returns something
                else than a number with a gradient.
            PeerError: the ranks have different batches.
        """
        samples = getattr(batch, "samples", None)
        if samples is None:
            raise _no_batch(batch)
        if not samples:
            raise _empty(batch)
        if self._policy_loss is None:
            raise _of_a_run(
                "its run trains every batch by the loss of its algorithm", "--advantage_estimator FILE.py:CLASS"
            )
        self._require_equal(batch)
        objective: Any = loss if hasattr(loss, "token_losses") else FunctionObjective.of(loss)
        objective.check(batch.samples)
        totals = MetricTotals()
        self.accumulate(batch, totals, loss=self._policy_loss.with_objective(objective, temperature=batch.temperature))
        return totals.merged(self._collectives)

    def accumulate(
        self,
        batch: TrainingBatch,
        totals: MetricTotals,
        *,
        loss: MicroBatchLoss | None = None,
        monitor: StepMonitor | None = None,
    ) -> None:
        """Add the gradient of the batch, without an exchange or a wait for the metrics, which go into `totals`.

        `loss` None = the trainer's own; `monitor` as of `Updater.forward_backward`.
        """
        self._updater.forward_backward(batch.samples, self._progress.updates, totals, batch.counts, monitor, loss=loss)

    def step(self) -> UpdateOutcome:
        """Change the weights once, by the gradients of all batches since the last step, clipped together.

        A gradient that is not finite changes nothing: the step is taken without the rows at fault, or refused
        (`applied` is false). Either way the gradients are gone afterwards.

        Raises:
            OptionsError: there was no `forward_backward` since the last step.
            NumericsError: weights are not finite, or more rows are at fault than may be set aside.
        """
        outcome = self._updater.step()
        self._progress.updates += 1
        self._changed |= outcome.applied
        if self._end_step is not None:
            self._end_step(outcome)
        return outcome

    def publish(self, version: int | None = None) -> None:
        """Let the engine sample from the weights as they are now, as version `version` (None = updates so far)."""
        if self._load_weights is not None:
            self._load_weights(self._progress.updates if version is None else version)
        self._changed = False

    def save(self, directory: str | Path) -> Path:
        """Write a checkpoint below the `directory` of rank 0, complete on disk when this returns; return its path.

        `model` in it is a Hugging Face directory with the tokenizer; moments and counters stand beside it, and
        `load_checkpoint` of a loop goes on from there, with any number of ranks.

        Raises:
            OptionsError: gradients wait for `step`, which no checkpoint holds; or the loop saves by itself.
            StorageError: it cannot be written.
            NumericsError: a weight is not finite.
        """
        if self._updater.num_batches:
            raise _unapplied(self._updater.num_batches)
        if self._save is None:
            raise _of_a_run("its run saves the ledger together with the weights, on its own schedule", "--save_steps 1")
        return self._save(Path(directory).expanduser(), self._progress.updates)

    def _require_equal(self, batch: TrainingBatch) -> None:
        """Refuse batches that differ between ranks: each would train its share of another batch."""
        if self._collectives.world_size == 1:
            return
        digest = hashlib.sha256()
        for sample in batch.samples:
            digest.update(json.dumps({**asdict(sample), "media": None}, sort_keys=True).encode())
        digests = self._collectives.gather_bytes(digest.hexdigest().encode())
        other = [rank for rank, one in enumerate(digests) if one != digests[0]]
        if other:
            raise _different(other)


def _no_batch(given: object) -> OptionsError:
    is_sampled = callable(getattr(given, "batch", None))
    return OptionsError(
        code="batch.none",
        what=f"the batch is of type {type(given).__name__}",
        where="trainer.forward_backward",
        why="completions become a batch with one advantage each" if is_sampled else "it is a TrainingBatch",
        state="no weight was changed",
        do="trainer.forward_backward(sampled.batch(advantages), loss)"
        if is_sampled
        else "trainer.forward_backward(policy.demonstrations([(prompt, response)]), loss)",
    )


def _empty(batch: TrainingBatch) -> OptionsError:
    return OptionsError(
        code="batch.empty",
        what=f"the batch has no sample (and {batch.counts.num_sequences} in its counts)",
        where="trainer.forward_backward",
        why="a gradient needs at least one sample",
        state="no weight was changed",
        do="if batch.samples: trainer.forward_backward(batch, loss)",
    )


def _unapplied(number: int) -> OptionsError:
    return OptionsError(
        code="update.unapplied_gradient",
        what=f"the gradients of {number} batches have not been applied",
        where="trainer.save",
        why="a checkpoint holds weights and moments; gradients would be lost in it",
        state="nothing was written",
        do="trainer.step()",
    )


def _of_a_run(why: str, do: str) -> OptionsError:
    return OptionsError(
        code="update.built_in",
        what="the trainer of a built-in loop was called by hand",
        where="trainer",
        why=why,
        state="nothing was changed",
        do=do,
    )


def _different(ranks: list[int]) -> PeerError:
    return PeerError(
        code="batch.differs",
        what=f"ranks {', '.join(map(str, ranks))} have another batch than rank 0",
        where="trainer.forward_backward",
        why="every rank trains its share of one batch; rewards or an order that differ between ranks would mix several",
        state="no weight was changed by this step",
        do="compute rewards and batches from what all ranks have, with the same seeds",
    )
