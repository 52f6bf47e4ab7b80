"""Counters of a loop of one's own: sampled prompts, and refused steps in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.rollouts.trained_policy import TrainedPolicy
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.settings.run import RunSettings
from rft_trainer.update.nonfinite_checks import refuse_more_steps
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import UpdateOutcome


class LoopCounters:
    """The counters that a checkpoint holds beside the updates."""

    def __init__(self) -> None:
        self._num_sampled = 0
        self._policy: TrainedPolicy | None = None

    @property
    def policy(self) -> TrainedPolicy | None:
        """The policy that counts the sampled prompts."""
        return self._policy

    @policy.setter
    def policy(self, policy: TrainedPolicy) -> None:
        self._policy = policy
        # a checkpoint is read before there is a policy
        policy.num_sampled = self._num_sampled

    def end_step(
        self, progress: Progress, guard: NumericGuard, timer: PhaseTimer, limits: RunSettings, outcome: UpdateOutcome
    ) -> None:
        """End a step: forget its rows, count it where it was refused, and let the watch know.

        Raises:
            NumericsError: more steps in a row were refused than the settings allow.
        """
        guard.begin_step()
        progress.step = progress.updates
        timer.step(num_samples=0, num_tokens=0)
        refused = progress.refused
        refused["policy"] = 0 if outcome.sound else refused.get("policy", 0) + 1
        refuse_more_steps(
            refused["policy"],
            limits.max_refused_steps,
            where=f"update {progress.updates}",
            saved_step=None,
            do="rft.open_loop(..., actor_learning_rate=<a tenth of the present one>)",
        )

    def state(self) -> dict[str, Any]:
        """Return the counters as plain JSON."""
        return {"num_sampled": self._num_sampled if self._policy is None else self._policy.num_sampled}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state()` returned."""
        self._num_sampled = int(state["num_sampled"])
