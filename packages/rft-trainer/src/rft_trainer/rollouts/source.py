"""Source of a training loop's rollouts, and the one that samples them while the trainer waits.

`async_rollouts.queue.AsyncRollouts` is the other one: it samples later steps while the trainer trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_trainer.batches.prompt_ledger import Ledger, LedgerEntry
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Engine, RefreshableEngine, SampledCompletion
from rft_trainer.records.rollouts import Prompt, RolloutGroup
from rft_trainer.rollouts.collector import RolloutCollector


class RolloutSource(Engine, Protocol):
    """Source of the rollouts of a loop, and the engine of its evaluations.

    Every rank calls the methods at the same point of a step; a weight version is the number of steps that are in it.
    """

    def reserve(self, num: int) -> list[LedgerEntry]:
        """Reserve the next `num` entries of the ledger for one step, never across the end of an epoch."""
        ...

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Return the scored groups of `entries`, in that order, on every rank."""
        ...

    def metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, object]:
        """Return metrics of the step that collected `groups`; called before `load_weights`."""
        ...

    def close(self) -> None:
        """Stop everything that runs beside the trainer. Does nothing the second time."""
        ...


class SyncRollouts:
    """Rollouts that are sampled when the trainer asks for them, with the weights that it trains next.

    Example::

        rollouts = SyncRollouts(engine, collector, ledger)
        entries = rollouts.reserve(8)
        groups = rollouts.collect(entries, prompts_of(entries), timer)
        ...                                              # train
        rollouts.load_weights(1)
    """

    def __init__(
        self,
        engine: RefreshableEngine,
        collector: RolloutCollector,
        ledger: Ledger,
        *,
        diagnose: Callable[[], Mapping[str, object]] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """Store the collaborators.

        Args:
            engine: serves the policy's weights; the collector samples with it.
            collector: samples and scores.
            ledger: hands out the prompts.
            diagnose: metrics of the engine's last call.
            close: ends the processes of an engine that has any.
        """
        self.engine, self.collector = engine, collector
        self._ledger, self._diagnose, self._close = ledger, diagnose, close

    def reserve(self, num: int) -> list[LedgerEntry]:
        """Reserve entries, as `RolloutSource.reserve`."""
        return self._ledger.reserve(num)

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Sample and score now, as `RolloutSource.collect`."""
        return self.collector.collect(entries, prompts, timer)

    def load_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version."""
        self.engine.load_weights(version)

    def refresh(self) -> None:
        """Serve the policy's present weights under the present version."""
        self.engine.refresh()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Sample completions, as `Engine.generate`."""
        return self.engine.generate(prompts, sample_keys, options, budgets=budgets, constraint=constraint, media=media)

    def sleep(self, level: int = 1) -> None:
        """Release the engine's memory until `wake` is called."""
        self.engine.sleep(level)

    def wake(self) -> None:
        """Restore the memory of a sleeping engine."""
        self.engine.wake()

    def metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, object]:
        """Return the diagnosis of the engine's last call, where there is one; no sample is stale."""
        del groups
        return self._diagnose() if self._diagnose is not None else {}

    def close(self) -> None:
        """End the engine's processes, where it has any."""
        if self._close is not None:
            self._close()
