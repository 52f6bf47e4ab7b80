"""LightRFT's names in Python, a façade over the one loop that `rft-train rl` runs.

```python
from rft_cli.lightrft.trainer import SPMDPPOTrainer

def custom_reward_fn(responses, labels):
    return [float(response == label) for response, label in zip(responses, labels)]

class CustomTrainer(SPMDPPOTrainer):
    def compute_advantages(self, batch):
        return super().compute_advantages(batch).clamp(min=0.0)

trainer = CustomTrainer(pretrain="MODEL", prompt_data="train.jsonl", reward_fn=custom_reward_fn)
result = trainer.fit()
```
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor

from rft import run_lifecycle
from rft.stages import rl
from rft_algos.objectives import RolloutBatch
from rft_cli.lightrft import keywords
from rft_cli.lightrft.strategy import Generation, Strategy
from rft_cli.pages.terminal import terminal
from rft_cli.records.discovery import training_of
from rft_core.errors import OptionsError
from rft_models.families.custom import has_manual_patches
from rft_models.families.patches import register_patch, unregister_patch
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.rewards.in_process import IN_PROCESS, FunctionReward
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.runs.trajectories import TrajectorySaver

__all__ = [
    "FitResult",
    "Generation",
    "RolloutBatch",
    "SPMDPPOTrainer",
    "Strategy",
    "TrajectorySaver",
    "register_patch",
    "unregister_patch",
]

RewardFunction = Callable[..., object]
"""`reward_fn(responses, labels)`: one number a response, None for no score; see `rft_trainer.workers.user_file`."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of a run: its directory and its held-out evaluations."""

    run_directory: Path
    before: Mapping[str, Any] | None
    """The held-out evaluation before the first step: `accuracy`, `reward`, `n`, ...; None without held-out data,
    and in a run that was continued on ranks other than the first."""
    after: Mapping[str, Any] | None
    """The same after the last step."""


class SPMDPPOTrainer:
    """A run of `rft-train rl`, with a reward function and advantages of your own where they are given.

    Everything is built from settings, when it is first needed. A subclass may override `compute_advantages` and
    `ppo_train`.
    """

    def __init__(
        self,
        *positional: object,
        reward_fn: RewardFunction | None = None,
        trajectory_saver: TrajectorySaver | None = None,
        **settings: object,
    ) -> None:
        """Resolve the settings; everything else is built when it is first needed.

        Args:
            positional: built objects, which LightRFT's trainer takes; refused.
            reward_fn: called in this process with all responses to a prompt and their labels.
            trajectory_saver: gets all rollouts of every step.
            settings: those of `rft-train rl` under their own names (`docs/reference/rl.md`), and `config`.

        Raises:
            SettingsError: with every problem of the settings, as on the command line.
            OptionsError: a reward function that cannot be called; a built object.
        """
        keywords.refuse_objects([type(item).__name__ for item in positional])
        self._reward = None if reward_fn is None else FunctionReward(reward_fn)
        name = None if self._reward is None else f"{IN_PROCESS}{self._reward.name}"
        self._resolved = keywords.resolved(settings, name)
        self._words = keywords.command_words(settings)
        self._saver = trajectory_saver
        self._stack = ExitStack()
        self._prepared: rl.PreparedRun | None = None
        self._strategy: Strategy | None = None
        self._signals: StopSignals | None = None
        self._begun = self._ended = False

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """The advantages of a step's rollouts, of sequences [N] or of tokens [T]; override it for your own.

        This one gives those of the algorithm [T]. What follows is the same for both: whitening and clipping over the
        batch, weights of the off-policy correction, where the settings ask for them. A critic learns the
        algorithm's own returns in any case.

        Every rank calls it with the same batch and has to get the same numbers.

        Args:
            batch: all rollouts of the step: `rewards_N`, `group_ids_N`, `lengths_N`, `segment_ids_T`, ...
        """
        return self._ready.training.assign_credit.own_advantages(batch)

    def fit(self) -> FitResult:
        """Run to the end, from the beginning or from where it stands: evaluations, steps, checkpoints, summary.

        Raises:
            RftError: what ends `rft-train rl` with an exit code.
        """
        with self._closed_on_error(), self._listening():
            self._begin()
            while not self.finished:
                step = self._ready.training.progress.step
                self.ppo_train()
                # an override without a step would repeat for ever
                if self._ready.training.progress.step == step:
                    raise _no_step(type(self).__name__)
            self.close()
        return self._result()

    def ppo_train(self) -> Mapping[str, object]:
        """Make one training step: sample, score, compare, update, and work due after it; return its metrics by name.

        `fit` calls it once a step. Called by hand, the first call begins the run and the last one ends it.

        Raises:
            OptionsError: nothing is left to train.
        """
        with self._closed_on_error(), self._listening() as signals:
            self._begin()
            if self.finished:
                raise _ended()
            done = self._ready.training.train_step(signals)
            if self._saver is not None and self._ready.machine.is_first:
                self._saver.save(done.data, step=self._ready.training.progress.step)
            if self.finished:
                self.close()
        return done.metrics

    @property
    def finished(self) -> bool:
        """True when nothing is left to train."""
        return self._ready.training.finished

    @property
    def actor(self) -> CausalPolicy:
        """The policy that is trained; `actor.model` is the transformers model."""
        return cast("CausalPolicy", self._ready.training.updater.model)

    @property
    def strategy(self) -> Strategy:
        """The engine, under LightRFT's names."""
        if self._strategy is None:
            self._strategy = Strategy(self._ready, self._resolved.settings)
        return self._strategy

    @property
    def run_directory(self) -> Path:
        """Directory of the run."""
        return self._ready.started.directory.path

    def close(self) -> None:
        """End the run as it is: a summary is written, ranks part. `fit` and the last `ppo_train` do it themselves."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a trainer that has built nothing has no run to end
        self._ended = self._ended or self._prepared is not None
        self._stack.__exit__(kind, error, trace)

    @property
    def _ready(self) -> rl.PreparedRun:
        if self._prepared is None:
            # `rft-train resume` cannot find code of a script: then the script is the command
            script = "" if self._is_plain else shlex.join(["python", *sys.argv])
            command = ["rft-train", keywords.COMMAND, *self._words] if self._is_plain else ["python", *sys.argv]
            overridden = type(self).compute_advantages is not SPMDPPOTrainer.compute_advantages
            self._prepared = self._stack.enter_context(
                rl.prepared(
                    self._resolved,
                    command,
                    reward=self._reward,
                    compute_advantages=self._checked_advantages if overridden else None,
                    script=script,
                    front=terminal(training_of(keywords.COMMAND)),
                )
            )
        return self._prepared

    @property
    def _is_plain(self) -> bool:
        """True when no code of the script is part of the run, so that `rft-train resume` can continue it."""
        overridden = any(
            getattr(type(self), name) is not getattr(SPMDPPOTrainer, name)
            for name in ("compute_advantages", "ppo_train")
        )
        return self._reward is None and not overridden and not has_manual_patches()

    def _checked_advantages(self, batch: RolloutBatch) -> Tensor:
        advantages: Any = self.compute_advantages(batch)
        if isinstance(advantages, Sequence):
            advantages = torch.tensor(advantages, dtype=torch.float64)
        if isinstance(advantages, Tensor):
            return advantages
        raise OptionsError(
            code="lightrft.no_advantages",
            what=f"{type(self).__name__}.compute_advantages returned {type(advantages).__name__}",
            where="compute_advantages",
            why="every response, or every token of the responses, needs an advantage",
            state="no weight was changed by this step",
            do="return super().compute_advantages(batch)",
        )

    def _begin(self) -> None:
        if self._begun:
            return
        ready = self._ready
        self._stack.enter_context(run_lifecycle.running(ready.training, ready.started))
        # before the first evaluation: if that fails, the run has begun and must be ended
        self._begun = True
        ready.training.begin()

    @contextmanager
    def _listening(self) -> Generator[StopSignals]:
        """Handle signals that ask for a save and an end; only the main thread can install the handlers."""
        # `fit` listens already while it calls `ppo_train`
        if self._signals is not None:
            yield self._signals
            return
        is_main = threading.current_thread() is threading.main_thread()
        with StopSignals() if is_main else nullcontext(StopSignals()) as signals:
            self._signals = signals
            try:
                yield signals
            finally:
                self._signals = None

    @contextmanager
    def _closed_on_error(self) -> Generator[None]:
        if self._ended and not self.finished:
            raise _ended()
        try:
            yield
        # an interrupt as well: the summary is written and the ranks part
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _result(self) -> FitResult:
        directory = self._ready.started.directory
        evaluations: dict[str, Any] = {
            name: {key.removeprefix("eval/"): value for key, value in result.as_record().items()}
            for name, result in self._ready.training.results.items()
        }
        summary = directory.read_summary() if self._ready.machine.is_first else None
        evaluations |= (summary or {}).get("eval", {})
        return FitResult(directory.path, evaluations.get("before"), evaluations.get("after"))


def _ended() -> OptionsError:
    return OptionsError(
        code="lightrft.ended",
        what="nothing is left to train: this trainer's run has ended",
        where="SPMDPPOTrainer",
        why="a trainer is one run",
        state="the run is unchanged since it ended",
        do="another trainer, with load_checkpoint=True to go on from what was saved",
    )


def _no_step(name: str) -> OptionsError:
    return OptionsError(
        code="lightrft.no_step",
        what=f"{name}.ppo_train returned without a training step",
        where="fit",
        why="fit calls ppo_train until the run has all its steps",
        state="the run is as it was before the call",
        do="super().ppo_train()",
    )
