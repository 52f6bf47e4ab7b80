"""Replica in a process of its own, the trainer's side: start, calls with deadlines, restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from rft_core.errors import RftError
from rft_core.fault_points import declare, fault_point
from rft_engine.engine_base import EngineFacts
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.process.client import EngineDied, EngineProcess
from rft_engine.process.hang_watch import HangLimits
from rft_engine.process.requests import fault_of_tokens, garbage, is_integer
from rft_engine.replicas.interrupt_flag import InterruptFlag
from rft_engine.weight_sync.fingerprints import compare
from rft_engine.weight_sync.shared_memory import WeightSnapshot

_RESULT_FIELDS = {field.name for field in fields(SampledTokens)}
POINT_DRAWN = declare("replica.drawn", "a replica has handed out what one sample has")


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Seconds after which a replica is given up; its process is then ended and started again."""

    start: float = 900.0
    silence: float = 600.0
    """Without a sign of life in its first call, which it gives at least once a segment of a few tokens; `hang_limits`
    knows later ones better."""
    load: float = 600.0
    other: float = 120.0


class ReplicaProcess(EngineProcess):
    """Engine process whose calls have a deadline for silence only: long work is not late."""

    renews_deadline = True
    # below 10 s with the look that finds it
    hang_limits = HangLimits(asleep=7.0, least_silence=8.0)


class ProcessReplica:
    """A started `replicas.worker` process and the calls to it; one thread at a time, `interrupt` from any."""

    can_resume = True
    reads_files = True

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        model: Mapping[str, Any],
        *,
        max_rows: int,
        max_len: int,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        limits: ReplicaLimits | None = None,
    ) -> None:
        """Start the process; `ready` waits for it, so that several start at once.

        Args:
            number: of this replica among its like, for messages.
            command: what starts a worker that calls `serve_replica`.
            model: JSON that the worker makes its model of.
            max_rows, max_len: of its engine.
            log_path: where it prints to.
            environment: variables beside this process's, such as CUDA_VISIBLE_DEVICES.
            limits: deadlines.
        """
        self.number, self.limits = number, limits or ReplicaLimits()
        self._command, self._environment, self._log_path = tuple(command), dict(environment or {}), log_path
        self._start_fields = {"model": dict(model), "max_rows": max_rows, "max_len": max_len}
        self._facts: EngineFacts | None = None
        self._version: int | None = None
        self._call = 0
        self._launch()

    @property
    def facts(self) -> EngineFacts:
        """Facts that the started engine reported."""
        assert self._facts is not None, "ready() comes first"
        return self._facts

    @property
    def pid(self) -> int:
        """Process id of the present process, or of the last one that ran."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until the engine is made.

        Raises:
            ServiceError: its process ended, or did not answer in time.
        """
        try:
            facts = self._process.call("start", self.limits.start, flag=str(self._flag.path), **self._start_fields)
        finally:
            # also after a failed start: the file would stay in shared memory
            self._flag.unlink()
        self._facts = EngineFacts(**facts)

    def load(self, snapshot: WeightSnapshot) -> None:
        """Serve these weights, once every tensor's digest agrees.

        Raises:
            ServiceError: they are not the model's, or the replica does not hold them afterwards.
        """
        received = self._process.call("load", self.limits.load, path=str(snapshot.path), version=snapshot.version)
        side = f"that engine replica {self.number} holds"
        compare(snapshot.digests, received, snapshot.version, snapshot.version, side)
        self._version = snapshot.version

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        """The results of a call as they come.

        Raises:
            EngineDied: the process is gone; what came before is good.
            ServiceError: it was silent for too long and has been ended, or answered what cannot be.
        """
        # before the request goes out: an `interrupt` with the number before ends nothing of this call
        self._call += 1
        answered: set[int] = set()
        for item in self._process.stream("draw", self.limits.silence, number=self._call, **call.fields()):
            if item is not None:
                drawn = _drawn_of(item, call, self.facts.vocab_size, self._version)
                if drawn.request in answered:
                    raise garbage(f"a replica answered request {drawn.request} of its call twice")
                answered.add(drawn.request)
                fault_point(POINT_DRAWN)
                yield drawn

    def interrupt(self) -> None:
        """End the call that is under way, between two steps; it hands out what it has."""
        self._flag.set(self._call)

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        """Start another process, whose weights come with the next load: `newest` may be replaced until it is ready."""
        del newest
        self.close()
        self._launch()
        self.ready()

    def sleep(self, level: int) -> None:
        """Give the cache back."""
        self._process.call("sleep", self.limits.other, level=level)

    def wake(self) -> None:
        """Wake the engine after `sleep`."""
        self._process.call("wake", self.limits.other)

    def close(self) -> None:
        """End the replica's process. Does nothing when it is gone."""
        self._process.kill()

    def _launch(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # numbers of calls begin again with a process, so the flag must too: the old one may have a number above them
        self._flag, self._call = InterruptFlag.create(), 0
        self._process = ReplicaProcess(self._command, self._environment, self._log_path)


def is_lost(error: RftError) -> bool:
    """Return True when the replica is gone and another one can draw its samples."""
    return isinstance(error, EngineDied) or error.problem.code in ("engine.deadline", "engine.garbage")


def _drawn_of(item: Any, call: SampleRequests, vocab_size: int, version: int | None) -> SampledTokens:
    """One result as a record; `version` is that of the weights that the replica holds.

    Raises:
        ServiceError: it cannot be a result of this call.
    """
    if fault := _fault_of(item, call, vocab_size, version):
        raise garbage(f"a replica answered {str(item)[:200]!r}, which {fault}")
    lists: dict[str, Any] = {name: tuple(item[name]) for name in ("token_ids", "logprobs", "log_kept_mass")}
    return SampledTokens(**(item | lists))


def _fault_of(item: Any, call: SampleRequests, vocab_size: int, version: int | None) -> str:
    """Return what is wrong with a result as it came as JSON; empty if nothing."""
    values = cast(dict[str, Any], item) if isinstance(item, dict) else dict[str, Any]()
    if values.keys() != _RESULT_FIELDS:
        return "is not a result"
    result = SampledTokens(**values)
    request, reason = result.request, result.finish_reason
    if not is_integer(request) or not 0 <= request < len(call.budgets):
        return f"is of none of its {len(call.budgets)} requests"
    if reason not in ("stop", "length", "interrupted"):
        return f"ends for the reason {reason!r}"
    budget = call.budgets[request]
    lists = (result.token_ids, result.logprobs, result.log_kept_mass)
    # an interrupted request may have had no turn yet
    allowed = range(0 if reason == "interrupted" else 1, budget + 1)
    if fault := fault_of_tokens(lists, allowed, vocab_size):
        return fault
    if result.weight_version != version:
        return f"comes from weights of version {result.weight_version}; the replica holds version {version}"
    # which sequences are whole is checked when all are there
    if call.constraint is not None:
        return "" if reason == "stop" or reason == "interrupted" else "is no whole sequence of the constraint"
    has_stopped = bool(result.token_ids) and result.token_ids[-1] in call.options.stop_token_ids
    if has_stopped != (reason == "stop"):
        return f"ends with token {result.token_ids[-1:]} for the reason {reason!r}"
    return f"ends before its {budget} tokens" if reason == "length" and len(result.token_ids) != budget else ""
