"""Asynchronous rollout queue: rollouts of later steps, sampled while the trainer trains.

Which prompts a step trains is fixed as in a synchronous run: the ledger's order. Step n may be drawn with
weights of version n - K and newer, K = `max_staleness`; a version is the number of steps that are in it.

```
  trainer's thread                     rollout thread (drawing)               scoring thread (scoring)
  ----------------                     ------------------------               ------------------------
  reserve(): steps n .. n+K       ──►  wait for work
  collect(n): wait for its groups      serve(version): replicas load it as they draw next
     ▲                                 draw(all that may be drawn) ───────►   group whole: decode, reward
     │                                    replicas: own processes   │            │
     │                                    ▲   sample asks (a tool)  │            │
     │                                    └── answering thread ◄────┘            │
     └───────────────────────────────────────── group has its rewards ◄──────────┘
  ranks: exchange the groups              │
  train n                                 │
  load_weights(n+1): publish,          ◄──┘ stop() turns true: samples end between two steps,
     reserve step n+1+K             ──►     and go on under version n+1 with the next draw
  generate (an evaluation)          ──►  carried out between two draws, under the newest version
     ▲                                    │
     └─────────── its answers ◄───────────┘
```

All of them share one state with one condition (`shared_state`): every wait ends, and an error of the other threads is
raised in the trainer's. Over several ranks each has such a queue for its share of the prompts (`rank_share`); only the
trainer's thread takes part in exchanges, where all ranks do: the groups of a step, its weights, a checkpoint.

With `deterministic` a step is drawn whole, alone, with exactly the weights of version n - K (the first
steps with those the run began with), so nothing depends on the clock: a draw is not interrupted, and
versions wait for it. Every K gives one run, to the bit, through any stops and resumes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import CheckpointError
from rft_core.exact_records import exact_line, value_of_line
from rft_core.fault_points import declare, fault_point
from rft_trainer.async_rollouts.generation_thread import POINT_GROUP_DRAWN, GenerationLoop
from rft_trainer.async_rollouts.partial_rollout import PartialGroup, oldest_version
from rft_trainer.async_rollouts.protocols import AsyncEngine, RolloutType
from rft_trainer.async_rollouts.rank_share import RankPartition
from rft_trainer.async_rollouts.scoring_threads import answering_loop, scoring_loop
from rft_trainer.async_rollouts.shared_state import SharedState, TrainerRequest
from rft_trainer.async_rollouts.single_turn import SingleResponses
from rft_trainer.batches.prompt_ledger import Ledger, LedgerEntry
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.protocols import Collectives, ResponseDecoder, SampledCompletion
from rft_trainer.records.rollouts import Prompt, RolloutGroup
from rft_trainer.rollouts.collector import RewardFunction, sample_keys

POINT_PUBLISHED = declare("async.published", "new weights are published, their step is not in the ledger yet")

_FORM = 2
"""Each group is a line of `rft_core.exact_records`, so that its floats keep their bits."""
_FORM_OF_JSON = 1
"""Each group is JSON, as earlier versions stored it."""


class AsyncRollouts:
    """The `RolloutSource` whose rollouts are sampled ahead of the trainer.

    Example::

        queue = AsyncRollouts(engine, tokenizer, reward, ledger, prompts, sampling=sampling, rules=rules)
        entries = queue.reserve(8)                        # and 8 more, for the next step, are being drawn
        groups = queue.collect(entries, prompts_of(entries), timer)
        ...                                              # train
        queue.load_weights(1)
    """

    def __init__(
        self,
        engine: AsyncEngine,
        decoder: ResponseDecoder,
        reward: RewardFunction,
        ledger: Ledger,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingOptions,
        rules: AsyncConfig,
        collectives: Collectives | None = None,
        kind: RolloutType | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the collaborators; threads start with the first entries.

        Args:
            engine: beside the trainer; it serves the weights that the run begins with as its present version.
            decoder, sampling: as of `RolloutCollector`.
            reward: it is called in a thread of its own (`ThreadSafeReward`).
            ledger: only the trainer's thread touches it.
            prompts: by the ledger's indices.
            rules: how far ahead.
            collectives: the ranks that share the prompts of a step; None = this one alone.
            kind: what samples are; None = single responses, scored by `reward`.
            clock: gives seconds.
        """
        self._engine, self._ledger, self._prompts, self._rules = engine, ledger, prompts, rules
        self._ranks = RankPartition(collectives)
        self._kind = kind or SingleResponses(decoder, reward, sampling.max_new_tokens)
        self._board = SharedState(rules.patience)
        self._drawing = GenerationLoop(self._board, engine, sampling, deterministic=rules.deterministic)
        self._reserved: deque[list[LedgerEntry]] = deque()
        self._restored: dict[LedgerEntry, dict[str, Any]] = {}
        self._collected: list[LedgerEntry] = []
        self._first_version = self._num_batches = 0
        self._begun = False
        self._clock = clock
        self._measured: float | None = None

    # -- the trainer's thread: what a loop asks of it

    def reserve(self, num: int) -> list[LedgerEntry]:
        """Return the entries of the next step; those of the steps after it are submitted to the engine."""
        assert num == self._rules.prompts_per_step, f"{num} prompts a step, {self._rules.prompts_per_step} were planned"
        with self._board.changed:
            self._begun = True
            self._fill()
        # the oldest reserved step; those behind it are drawn while it is trained
        return self._reserved.popleft() if self._reserved else []

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Collect groups in the order of `entries`; those not submitted yet are sampled with the newest weights."""
        board, own = self._board, [entry for entry in entries if self._ranks.owns(entry)]
        with timer.phase(Phase.ROLLOUT):
            with board.changed:
                # refill prompts of this step, and all prompts where nothing runs ahead
                if new := [entry for entry in own if entry not in board.groups]:
                    self._submit(new, board.version + self._rules.max_staleness)
                # kept until the weights of their step are published: a checkpoint before it holds these samples
                self._collected += own
            try:
                board.wait(lambda: all(board.groups[e].group is not None for e in own), "the rewards of a step")
            except Exception as error:
                self._ranks.tell_error(error)  # the other ranks wait in the exchange of the groups
                raise
        # without the lock: nothing changes a group that has its rewards, and only this thread removes it
        groups = [board.groups[entry].group for entry in own]
        with timer.phase(Phase.SYNC):
            return self._ranks.everyones([group for group in groups if group is not None], entries, prompts)

    def load_weights(self, version: int) -> None:
        """Publish the policy's present weights as `version` to the replicas, and release one more step for sampling."""
        # not under the lock: threads sample on while the weights are copied
        self._engine.publish(version)
        fault_point(POINT_PUBLISHED)
        board = self._board
        with board.changed:
            # trained, so that from here on no checkpoint needs their samples
            for entry in self._collected:
                del board.groups[entry]
            # before `_fill`, which counts steps from the newest version
            self._collected, board.version = [], version
            if self._begun:
                self._fill()
            else:
                self._first_version = version  # a resume: these are the oldest that there are
            board.tell()

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
        """Generate with the newest weights, between two draws."""
        return self._run_request(
            lambda: self._engine.generate(
                prompts, sample_keys, options, budgets=budgets, constraint=constraint, media=media
            )
        )

    def sleep(self, level: int = 1) -> None:
        """Do nothing: engines that run ahead do not sleep."""

    def wake(self) -> None:
        """Do nothing: engines that run ahead are always awake."""

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Compute the staleness of a step's samples, and the engines' metrics since the last step."""
        lags: list[tuple[int, int]] = []
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            spans = rollout.version_spans or ((rollout.weight_version, rollout.num_sampled),)
            lags += [(self._board.version - version, num) for version, num in spans if num]
        with self._board.changed:
            # the groups of the present step have rewards too, but are no longer ahead
            waiting = sum(one.group is not None for one in self._board.groups.values()) - len(self._collected)
        num_tokens = sum(num for _, num in lags)
        now, before = self._clock(), self._measured
        self._measured = now
        # of the first step it is not known: its samples are drawn before its seconds begin
        seconds = 0.0 if before is None else now - before
        speed = {"time/engine_tokens_per_second": num_tokens / seconds} if seconds > 0 else {}
        return {
            "async/staleness_mean": sum(lag * num for lag, num in lags) / max(num_tokens, 1),
            "async/staleness_max": max((lag for lag, _ in lags), default=0),
            "async/mixed_share": sum(bool(rollout.version_spans) for rollout in rollouts) / len(rollouts),
            **speed,
            **self._ranks.totals({"time/groups_ahead": float(waiting), **self._engine.counters()}),
        }

    def close(self) -> None:
        """Stop the threads and the engines. Does nothing the second time."""
        # first the threads, which otherwise call engines that are closed
        self._board.close()
        self._engine.close()

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Return JSON: samples of entries in flight on all ranks, with their tokens so far; all ranks call it.

        A group is a text of `rft_core.exact_records`.

        A deterministic run waits for the steps that older weights draw; one that the newest draw is drawn again.
        """
        rows = self._ranks.all_rows(self._rows())
        return {"form": _FORM, "groups": [exact_line(row).decode() for row in rows]} if self._ranks.is_first else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`; the stored samples are matched when the ledger hands their entries out again."""
        if state.get("form") not in (_FORM, _FORM_OF_JSON) or isinstance(state["form"], bool):
            raise CheckpointError(
                code="checkpoint.rollouts_ahead",
                what=f"rollouts in flight have form {state.get('form')!r}; {_FORM_OF_JSON} and {_FORM} are read",
                where="rollouts ahead, in the checkpoint",
                why="samples that were drawn before the stop are trained after it",
                do="resume with the version of the program that wrote it",
            )
        # of all ranks: a resume may have another number of them, and each takes the rows that it owns now
        stored = state["groups"] if state["form"] == _FORM_OF_JSON else map(_row_of, state["groups"])
        rows = {LedgerEntry(*(int(value) for value in row["entry"])): dict(row) for row in stored}
        self._restored = {entry: row for entry, row in rows.items() if self._ranks.owns(entry)}

    def _rows(self) -> list[dict[str, Any]]:
        """Return the states of this rank's groups for a checkpoint."""
        board = self._board
        if self._rules.deterministic and self._begun:
            # their versions are not in the checkpoint, so nothing could finish these samples after a resume
            what = "the samples of older weights, for a checkpoint"
            board.wait(self._older_are_whole, what, despite_outage=True)
        with board.changed:
            kept = [group.state() for group in board.groups.values() if self._is_kept(group)]
        # restored and not handed out again yet: a save before the first step would lose them otherwise
        return [*kept, *self._restored.values()]

    def _older_are_whole(self) -> bool:
        board = self._board
        return all(self._is_whole(group) for group in board.groups.values() if group.version < board.version)

    def _is_kept(self, group: PartialGroup) -> bool:
        if not self._rules.deterministic:
            return True
        batch = [other for other in self._board.groups.values() if other.batch == group.batch]
        return all(self._is_whole(other) for other in batch)  # drawn again as a whole, or not at all

    def _is_whole(self, group: PartialGroup) -> bool:
        # where the reward server is away, a resume scores what is drawn
        return group.group is not None or (self._board.outage is not None and group.is_complete)

    # -- under the lock

    def _fill(self) -> None:
        """Reserve the steps from the present one to K after it: the same entries on every rank."""
        rules, version = self._rules, self._board.version
        while len(self._reserved) <= rules.max_staleness:
            # not beyond the last step: engines would draw what nobody trains
            if rules.max_steps and version + len(self._reserved) >= rules.max_steps:
                return
            # fewer at the end of an epoch, and no entry of the next one: steps do not span two epochs
            entries = self._ledger.reserve(rules.prompts_per_step)
            if not entries:
                return
            self._reserved.append(entries)
            own = [entry for entry in entries if self._ranks.owns(entry)]
            # without staleness nothing is drawn ahead: `collect` submits the step
            if rules.max_staleness and own:
                self._submit(own, version + len(self._reserved) - 1)

    def _submit(self, entries: Sequence[LedgerEntry], step: int) -> None:
        """Submit entries to the rollout thread as those of one step."""
        self._num_batches += 1
        oldest = step - self._rules.max_staleness
        # a resumed run has no weights older than those of its checkpoint
        version = max(oldest, self._first_version)
        for entry in entries:
            prompt = self._prompts[entry.prompt_index]
            keys = sample_keys(self._rules.seed, entry, self._rules.group_size)
            group = PartialGroup(entry, prompt, self._kind.begin(prompt, keys), self._num_batches, version)
            # samples that have become too old by now are drawn anew rather than refused when they are trained
            if (saved := self._restored.pop(entry, None)) is not None and oldest_version(saved, version) >= oldest:
                group.take(saved, partial(self._kind.restore, prompt, keys))
            self._board.groups[entry] = group
            # a restored group may lack nothing but its rewards
            self._board.queue_if_complete(group)
        self._board.tell()
        self._start()

    def _start(self) -> None:
        loops: dict[str, Callable[[], None]] = {
            "rollouts": self._drawing.run,
            "scoring": partial(scoring_loop, self._board, self._kind),
        }
        for worker_index in range(self._kind.answers):
            drawn = partial(fault_point, POINT_GROUP_DRAWN)
            loops[f"answering-{worker_index}"] = partial(answering_loop, self._board, self._kind, worker_index, drawn)
        self._board.start(loops)

    def _run_request(self, run: Callable[[], Any]) -> Any:
        request = TrainerRequest(run, self._board.version)
        with self._board.changed:
            self._board.requests.append(request)
            self._board.tell()
            self._start()
        # no lock is held while the engine generates; the rollout thread notifies when it is done
        self._board.wait(lambda: request.is_done, "an evaluation")
        if request.error is not None:
            raise request.error
        return request.result


@dataclass(frozen=True, slots=True)
class AsyncConfig:
    """Settings of asynchronous rollouts: staleness, determinism, and the size of a step."""

    max_staleness: int
    deterministic: bool
    prompts_per_step: int
    max_steps: int
    """Steps of the whole run; 0 = until the ledger ends."""
    group_size: int
    seed: int
    patience: float = 1800.0
    """Seconds without any movement after which a wait is given up."""


def _row_of(line: str) -> dict[str, Any]:
    """Return the state of a group from its line in a checkpoint.

    Raises:
        CheckpointError: it is no such line.
    """
    try:
        row = value_of_line(line.encode())
        # a row without its entry belongs to no prompt
        if not isinstance(row, dict) or "entry" not in row:
            raise ValueError("it is no group of a ledger entry")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            code="checkpoint.rollouts_ahead",
            what=f"a group of rollouts in flight cannot be read: {error}",
            where="rollouts ahead, in the checkpoint",
            why="samples that were drawn before the stop are trained after it",
            do="resume from the checkpoint before it",
        ) from error
    return cast(dict[str, Any], row)
