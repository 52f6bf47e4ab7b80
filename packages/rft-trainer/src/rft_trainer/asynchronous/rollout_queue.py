"""Rollouts of the steps to come, drawn while the trainer trains: `collect` and the engine of a loop in one.

Which prompts a step trains is fixed as in a synchronous run: the ledger's order. Step n may be drawn with
weights of version n - K and newer, K = `max_staleness`; a version is the number of steps that are in it.

```
  trainer's thread                     rollout thread                         scoring thread
  ----------------                     --------------                         --------------
  take(): reserve steps n .. n+K  ──►  wait for work
  collect(n): wait for its groups      serve(version): replicas load it
     ▲                                 draw(all that may be drawn) ───────►   group whole: decode, reward
     │                                    replicas: own processes                │
     └───────────────────────────────────────── group has its rewards ◄──────────┘
  train n                                 │
  load_weights(n+1): publish,          ◄──┘ stop() turns true: samples end between two steps,
     reserve step n+1+K             ──►     and go on under version n+1 with the next draw
  generate (an evaluation)          ──►  carried out between two draws, under the newest version
     ▲                                    │
     └─────────── its answers ◄───────────┘
```

All three share one condition: whoever changes something notifies, whoever waits looks again at least every
half second, whether a thread has failed and whether anything has moved for `patience` seconds. An error
of the other threads is raised in the trainer's.

With `deterministic` a step is drawn whole, alone, with exactly the weights of version n - K (the first
steps with those the run began with), so nothing depends on the clock: a draw is not interrupted, and
versions wait for it. Every K gives one run, to the bit, through any stops and resumes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rft_algos.errors import CheckpointError, ServiceError
from rft_algos.fault_points import declare, fault_point
from rft_trainer.asynchronous.drafts import Draft, GroupDraft, oldest_version
from rft_trainer.asynchronous.protocols import AheadEngine
from rft_trainer.ledger import Ledger, LedgerEntry
from rft_trainer.protocols import ResponseDecoder, SampledCompletion
from rft_trainer.records import Prompt, RolloutGroup, Sampling
from rft_trainer.rollouts import RewardFunction, sample_keys, score_rollouts
from rft_trainer.throughput import Phase, PhaseTimer

POINT_PUBLISHED = declare("async.published", "new weights are published, their step is not in the ledger yet")
POINT_GROUP_DRAWN = declare("async.group_drawn", "every sample of a prompt is drawn, none has its reward")

_LOOK_SECONDS = 0.5
_FORM = 1


@dataclass(frozen=True, slots=True)
class AheadRules:
    """How far ahead, and how."""

    max_staleness: int
    deterministic: bool
    prompts_per_step: int
    max_steps: int
    """Steps of the whole run; 0 = until the ledger ends."""
    group_size: int
    seed: int
    patience: float = 1800.0
    """Seconds without any movement after which a wait is given up."""


@dataclass(slots=True)
class _Errand:
    """Something that the rollout thread does between two draws, for a thread that waits."""

    run: Callable[[], Any]
    version: int
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Turn:
    """What the rollout thread does next."""

    version: int
    generation: int
    groups: list[GroupDraft] = field(default_factory=list[GroupDraft])
    errand: _Errand | None = None


class RolloutQueue:
    """The engine and the collector of a `Reinforcement` whose rollouts run ahead.

    Example::

        queue = RolloutQueue(engine, codec, reward, ledger, prompts, sampling=sampling, rules=rules)
        entries = queue.take(8)                          # and 8 more, for the next step, are being drawn
        groups = queue.collect(entries, prompts_of(entries), timer)
        ...                                              # train
        queue.load_weights(1)
    """

    def __init__(
        self,
        engine: AheadEngine,
        decoder: ResponseDecoder,
        reward: RewardFunction,
        ledger: Ledger,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        rules: AheadRules,
    ) -> None:
        """
        Args:
            engine: beside the trainer; it serves the weights that the run begins with as its present version.
            decoder, sampling: as of `RolloutCollector`.
            reward: it is called in a thread of its own (`SerialReward`).
            ledger: only the trainer's thread touches it.
            prompts: by the ledger's indices.
            rules: how far ahead.
        """
        self._engine, self._decoder, self._reward = engine, decoder, reward
        self._ledger, self._prompts, self._sampling, self._rules = ledger, prompts, sampling, rules
        self._changed = threading.Condition()
        self._ahead: deque[list[LedgerEntry]] = deque()
        self._groups: dict[LedgerEntry, GroupDraft] = {}
        self._restored: dict[LedgerEntry, Mapping[str, Any]] = {}
        self._to_score: deque[GroupDraft] = deque()
        self._errands: deque[_Errand] = deque()
        self._collected: list[LedgerEntry] = []
        self._version = self._first_version = 0
        self._generation = self._batches = 0
        self._begun = self._closing = False
        self._error: BaseException | None = None
        self._moved_at = time.monotonic()
        self._doing = "nothing yet"
        self._threads: list[threading.Thread] = []

    # -- the trainer's thread: what a loop asks of it

    def take(self, num: int) -> list[LedgerEntry]:
        """The entries of the next step; those of the steps after it are handed to the engine."""
        assert num == self._rules.prompts_per_step, f"{num} prompts a step, {self._rules.prompts_per_step} were planned"
        with self._changed:
            self._begun = True
            self._fill()
        return self._ahead.popleft() if self._ahead else []

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        """Groups in the order of `entries`; those that nobody draws yet are drawn with the newest weights."""
        with timer.phase(Phase.ROLLOUT):
            with self._changed:
                if new := [entry for entry in entries if entry not in self._groups]:
                    self._submit(new, self._version + self._rules.max_staleness)
                self._collected += entries
            self._wait(lambda: all(self._groups[entry].group is not None for entry in entries), "the rewards of a step")
        groups = [self._groups[entry].group for entry in entries]
        return [group for group in groups if group is not None]

    def load_weights(self, version: int) -> None:
        """The policy's present weights are `version`: kept for the replicas, and one more step may be drawn."""
        self._engine.publish(version)
        fault_point(POINT_PUBLISHED)
        with self._changed:
            for entry in self._collected:
                del self._groups[entry]
            self._collected, self._version = [], version
            if self._begun:
                self._fill()
            else:
                self._first_version = version
            self._tell()

    def generate(
        self, prompts: Sequence[Sequence[int]], sample_keys: Sequence[Sequence[int]], **options: Any
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Answers of the newest weights, between two draws."""
        return self._run_errand(lambda: self._engine.generate(prompts, sample_keys, **options))

    def sleep(self, level: int = 1) -> None:
        """Nothing: engines that run ahead do not sleep."""

    def wake(self) -> None:
        """Nothing."""

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """How old the samples of a step are when it is trained, and what the engines did since the last step."""
        lags: list[tuple[int, int]] = []
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            spans = rollout.version_spans or ((rollout.weight_version, len(rollout.completion_ids)),)
            lags += [(self._version - version, num) for version, num in spans]
        with self._changed:
            ahead = sum(held.group is not None for held in self._groups.values()) - len(self._collected)
        num_tokens = sum(num for _, num in lags)
        return {
            "async/staleness_mean": sum(lag * num for lag, num in lags) / num_tokens,
            "async/staleness_max": max(lag for lag, _ in lags),
            "async/mixed_share": sum(bool(rollout.version_spans) for rollout in rollouts) / len(rollouts),
            "time/groups_ahead": ahead,
            **self._engine.counters(),
        }

    def close(self) -> None:
        """End both threads and the engines. Does nothing the second time."""
        with self._changed:
            self._closing = True
            self._tell()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)
        self._threads = []
        self._engine.close()

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Plain JSON: samples of entries in flight, as far as they are drawn.

        A deterministic run waits for the steps that older weights draw; one that the newest draw is drawn again.
        """
        if self._rules.deterministic and self._begun:
            self._wait(self._older_are_whole, "the samples of older weights, for a checkpoint")
        with self._changed:
            return {"form": _FORM, "groups": [held.state() for held in self._groups.values() if self._is_kept(held)]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; entries are found again when the ledger hands them out."""
        if state.get("form") != _FORM:
            raise CheckpointError(
                code="checkpoint.rollouts_ahead",
                what=f"rollouts in flight are stored in form {state.get('form')!r}, known is {_FORM}",
                where="rollouts ahead, in the checkpoint",
                why="samples that were drawn before the stop are trained after it",
                do="resume with the version of the program that wrote it",
            )
        rows = state["groups"]
        self._restored = {LedgerEntry(*(int(value) for value in row["entry"])): row for row in rows}

    def _older_are_whole(self) -> bool:
        return all(held.group is not None for held in self._groups.values() if held.version < self._version)

    def _is_kept(self, held: GroupDraft) -> bool:
        if not self._rules.deterministic:
            return True
        batch = [other for other in self._groups.values() if other.batch == held.batch]
        return all(other.group is not None for other in batch)  # drawn again as a whole, or not at all

    # -- under the condition

    def _fill(self) -> None:
        """Reserve the steps from the present one to K after it."""
        rules = self._rules
        while len(self._ahead) <= rules.max_staleness:
            if rules.max_steps and self._version + len(self._ahead) >= rules.max_steps:
                return
            entries = self._ledger.reserve(rules.prompts_per_step)
            if not entries:
                return
            self._ahead.append(entries)
            if rules.max_staleness:
                step = self._version + len(self._ahead) - 1
                self._submit(entries, step)

    def _submit(self, entries: Sequence[LedgerEntry], step: int) -> None:
        """Hand entries to the rollout thread, to be drawn as those of a step are."""
        self._batches += 1
        oldest = step - self._rules.max_staleness
        version = max(oldest, self._first_version)
        for entry in entries:
            keys = sample_keys(self._rules.seed, entry, self._rules.group_size)
            drafts = [Draft(key, self._sampling.max_new_tokens) for key in keys]
            held = GroupDraft(entry, self._prompts[entry.prompt_index], drafts, self._batches, version)
            if (saved := self._restored.pop(entry, None)) is not None and oldest_version(saved, version) >= oldest:
                held.take(saved)
            self._groups[entry] = held
            if held.group is None and held.is_drawn:
                self._to_score.append(held)
        self._tell()
        self._start()

    def _tell(self) -> None:
        """Something changed: whoever waits looks, and a draw that may be interrupted is."""
        self._generation += 1
        self._moved_at = time.monotonic()
        self._changed.notify_all()

    def _start(self) -> None:
        if self._threads or self._closing:
            return
        for name, loop in (("rollouts", self._draw_loop), ("scoring", self._score_loop)):
            thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- waiting

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        """Until `holds`, asked under the condition; raises what another thread raised, or who is late."""
        with self._changed:
            while not holds():
                if self._error is not None:
                    raise self._error
                still = time.monotonic() - self._moved_at
                if still > self._rules.patience:
                    raise self._late(what, still)
                self._changed.wait(_LOOK_SECONDS)

    def _late(self, what: str, seconds: float) -> ServiceError:
        missing = [held for held in self._groups.values() if held.group is None]
        drawn = sum(held.is_drawn for held in missing)
        return ServiceError(
            code="rollouts.late",
            what=f"nothing has moved for {seconds:.0f} s while the trainer waits for {what}: {len(missing)} groups are "
            f"missing, of which {drawn} wait for their rewards; the rollout thread: {self._doing}",
            where=f"rollouts ahead of step {self._version + 1}",
            why=f"a wait is given up after {self._rules.patience:g} s without a new sample, reward or version",
            state="no weight was changed by this step; the last checkpoint holds what was in flight then",
            do="see the engines' logs; a reward that takes longer: --reward_timeout",
        )

    def _run_errand(self, run: Callable[[], Any]) -> Any:
        errand = _Errand(run, self._version)
        with self._changed:
            self._errands.append(errand)
            self._tell()
            self._start()
        self._wait(lambda: errand.is_done, "an evaluation")
        if errand.error is not None:
            raise errand.error
        return errand.result

    @contextmanager
    def _noted(self, doing: str) -> Iterator[None]:
        self._doing = doing
        yield
        self._doing = "waits for work"

    # -- the rollout thread

    def _guarded(self, loop: Callable[[], None]) -> None:
        """A thread's life; what ends it early is the trainer's error."""
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            error.add_note(f"in the thread {threading.current_thread().name}: {self._doing}")
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _draw_loop(self) -> None:
        while (turn := self._next_turn()) is not None:
            if self._engine.weight_version != turn.version:
                with self._noted(f"gives version {turn.version} to the engines"):
                    self._engine.serve(turn.version)
            if turn.errand is not None:
                with self._noted(f"generates with version {turn.version} for the trainer"):
                    self._carry_out(turn.errand)
            else:
                with self._noted(f"draws {len(turn.groups)} groups with version {turn.version}"):
                    self._draw(turn)

    def _next_turn(self) -> _Turn | None:
        """Waits for work; None at the end."""
        with self._changed:
            while not self._closing:
                if (turn := self._choose()) is not None:
                    return turn
                self._changed.wait(_LOOK_SECONDS)
        return None

    def _choose(self) -> _Turn | None:
        """What comes first: in a deterministic run older versions, elsewhere whoever waits in the trainer's thread."""
        open_groups = [held for held in self._groups.values() if not held.is_drawn]
        if self._rules.deterministic:
            first = min(open_groups, key=lambda held: (held.version, held.batch), default=None)
            if self._errands and (first is None or first.version >= self._errands[0].version):
                errand = self._errands.popleft()
                return _Turn(errand.version, self._generation, errand=errand)
            if first is None:
                return None
            batch = [held for held in open_groups if held.batch == first.batch]
            return _Turn(first.version, self._generation, batch)
        if self._errands:
            return _Turn(self._version, self._generation, errand=self._errands.popleft())
        return _Turn(self._version, self._generation, open_groups) if open_groups else None

    def _carry_out(self, errand: _Errand) -> None:
        try:
            errand.result = errand.run()
        except Exception as error:  # noqa: BLE001 - raised in the thread that asked
            errand.error = error
        with self._changed:
            errand.is_done = True
            self._moved_at = time.monotonic()
            self._changed.notify_all()

    def _draw(self, turn: _Turn) -> None:
        """All samples of the groups that have not ended, until they have or something changed."""
        owners = [(held, draft) for held in turn.groups for draft in held.drafts if not draft.finish_reason]
        given = self._sampling
        drawn = self._engine.draw(
            [(*held.prompt.token_ids, *draft.token_ids) for held, draft in owners],
            [draft.key for _, draft in owners],
            [len(draft.token_ids) for _, draft in owners],
            [draft.left for _, draft in owners],
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            min_new_tokens=given.min_new_tokens,
            stop_token_ids=given.stop_token_ids,
            first_token_temperature=given.first_token_temperature,
            stop=lambda: self._closing or (not self._rules.deterministic and self._generation != turn.generation),
        )
        for one in drawn:
            held, draft = owners[one.request]
            with self._changed:
                draft.add(one)
                self._moved_at = time.monotonic()
                is_whole = held.is_drawn
            if is_whole:
                fault_point(POINT_GROUP_DRAWN)
                with self._changed:
                    self._to_score.append(held)
                    self._changed.notify_all()

    # -- the scoring thread

    def _score_loop(self) -> None:
        while batch := self._next_to_score():
            texts = iter(self._decoder.decode_batch([draft.token_ids for held in batch for draft in held.drafts]))
            sampled = [held.rollouts([next(texts) for _ in held.drafts]) for held in batch]
            scored = score_rollouts(self._reward, [held.prompt for held in batch], sampled, self._decoder)
            with self._changed:
                for held, rollouts in zip(batch, scored, strict=True):
                    held.group = RolloutGroup(held.prompt, held.entry.epoch, held.entry.position, tuple(rollouts))
                self._moved_at = time.monotonic()
                self._changed.notify_all()

    def _next_to_score(self) -> list[GroupDraft]:
        """Every group that waits; nothing at the end."""
        with self._changed:
            while not self._to_score and not self._closing:
                self._changed.wait(_LOOK_SECONDS)
            batch = [] if self._closing else list(self._to_score)
            self._to_score.clear()
            return batch
