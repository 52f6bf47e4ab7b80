"""An engine in a process of its own: bounded by deadlines, and started again when it dies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rft_core.errors import RftError, ServiceError
from rft_core.json_records import fields_of
from rft_engine.engine_base import EngineFacts
from rft_engine.process.backend_engine import Backend, BackendEngine, SentWeights
from rft_engine.process.client import EngineDied, EngineProcess
from rft_engine.process.requests import Answers, GenerateCall, SampleResult, StepCounts, message_of
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.weight_sync.weight_errors import parity_error


class ProcessBackend:
    """A started worker process and the calls to it."""

    def __init__(
        self,
        settings: ExternalEngineSettings,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        explain: Callable[[str], RftError | None] = lambda log: None,
    ) -> None:
        """Start the process and the library in it.

        Args:
            settings: of the library.
            command: what starts the worker.
            environment: variables of the process beside this one's.
            log_path: where it prints to.
            explain: given the end of the log of a process that ended while it started: the error that names the
                cause, where it is a known one.
        """
        self._settings = settings
        self._process = EngineProcess(command, environment, log_path)
        # paths become text
        fields = json.loads(json.dumps(asdict(settings), default=str))
        try:
            self.facts = EngineFacts(**self._process.call("start", settings.deadlines.start, settings=fields))
        except EngineDied as error:
            self._process.kill()
            # `where` holds the end of the log, in which the library wrote why it ended
            if (known := explain(error.problem.where)) is not None:
                raise known from error
            raise
        # an interrupt during a start of minutes must not leave the process behind
        except BaseException:
            self._process.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        """Results as samples finish, then the counts."""
        slack = self._settings.deadlines.other  # the worker gives up first, between two steps, and stays alive
        messages = self._process.stream("generate", seconds + slack, within=seconds, **fields_of(call))
        counts = yield from _results(messages)
        yield message_of(counts)

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        """Call a method of every worker of that vLLM by name, with JSON values."""
        limit = seconds or self._settings.deadlines.other
        return self._process.call("rpc", limit, method=method, arguments=list(arguments))

    def serve(self, version: int) -> None:
        self._process.call("serve", self._settings.deadlines.other, version=version)

    def sleep(self, level: int) -> None:
        self._process.call("sleep", self._settings.deadlines.other, level=level)

    def wake(self, tags: list[str]) -> None:
        self._process.call("wake", self._settings.deadlines.other, tags=tags)

    def close(self) -> None:
        self._process.kill()


class ProcessEngine(BackendEngine):
    """`BackendEngine` with the library in a process of its own.

    The process is ended when a call passes its deadline, and started again when it is needed and
    gone: the present weights are sent and verified before it serves. Samples that were under way are
    asked for again under their keys, so they come out as they would have.
    """

    def __init__(
        self,
        settings: ExternalEngineSettings,
        source: SentWeights,
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        command: Sequence[str],
        max_restarts: int,
    ) -> None:
        """Start the library in a process of its own.

        Args:
            settings, source: as for `BackendEngine`.
            environment: variables of the process beside this one's, such as CUDA_VISIBLE_DEVICES.
            log_path: where it prints to; None = a file in the temporary directory.
            command: what starts the worker.
            max_restarts: times that one call may start it again before the call fails.
        """
        # before the base class is made, which starts the process with these
        self._command, self._environment = tuple(command), dict(environment or {})
        self._log_path = log_path or Path(tempfile.mkdtemp(prefix=f"rft-{settings.library}-")) / "engine.log"
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self._sent_at_load: dict[str, str] = {}
        super().__init__(settings, source)

    @property
    def pid(self) -> int:
        """Process id of the present process, or of the last one that ran."""
        assert isinstance(self._backend, ProcessBackend)
        return self._backend.pid

    @property
    def log_path(self) -> Path:
        """Path of the log that the process prints to."""
        return self._log_path

    def _start(self) -> Backend:
        return ProcessBackend(self._settings, self._command, self._environment, self._log_path, self._explain)

    def _explain(self, log: str) -> RftError | None:
        """Return the error that names why a start failed, from the end of its log; None where that is not known."""
        return None

    def _collect(self, call: GenerateCall, answers: Answers) -> StepCounts:
        """Collect results while the process lives, the rest from the next one; end one that answers garbage."""
        for attempt in range(self._max_restarts + 1):
            if not self._backend.is_alive:
                self._restart()
            # finished samples are kept; the others come out the same under their keys
            left = [(sample, prompt) for sample, prompt in call.requests if sample not in answers.done]
            try:
                return super()._collect(replace(call, requests=left), answers)
            except EngineDied:
                if attempt == self._max_restarts:
                    raise
            except ServiceError as error:
                if error.problem.code == "engine.garbage":
                    self._backend.close()  # the state of its weights is unknown
                raise
        raise AssertionError("unreachable")

    def _backend_sleep(self, level: int) -> None:
        """Put the library to sleep; a process that is gone has given its memory back already."""
        with suppress(EngineDied):
            super()._backend_sleep(level)

    def _wake_tags(self, *tags: str) -> None:
        """Wake the library; a process that is gone is started later, by the generation or update that needs it."""
        if self._backend.is_alive:
            with suppress(EngineDied):
                super()._wake_tags(*tags)

    def _update(self, version: int) -> None:
        """Update the weights; a process that is gone or dies meanwhile is started once more."""
        if not self._backend.is_alive:
            self._renew()
        try:
            super()._update(version)
        # a death says nothing about the weights: the same update is right for the next process
        except EngineDied:
            self._renew()
            super()._update(version)
        except ServiceError:
            self._backend.close()  # the state of its weights is unknown
            raise
        # after success alone: a restart compares with what the last process really served
        self._sent_at_load = dict(self._source.sent)

    def _renew(self) -> None:
        """Start another process, with the weights of the model directory."""
        # before the next one starts: two processes may not fit into the device's memory
        self._backend.close()
        self.num_restarts += 1
        self._backend = self._start()
        self._transport = self._make_transport()
        # whatever slept in the last process, a new one starts awake
        self._awake_tags = {"weights", "kv_cache"}

    def _restart(self) -> None:
        """Start another process and load the weights that the last one held."""
        self._renew()
        # nothing was loaded yet: what the model directory holds is what the last process served
        if not self._sent_at_load:
            return
        version = self.weight_version
        received = self._transport.send()
        self._verify(received, version)
        # parameters may have been trained since the load: the version must not be served with other values
        if self._source.sent != self._sent_at_load:
            raise _moved_on(version)
        self._backend.serve(version)


def _results(messages: Generator[Any, None, Any]) -> Generator[SampleResult | StepCounts, None, Any]:
    """Yield the items of a stream as records; return its reply."""
    while True:
        try:
            item = next(messages)
        except StopIteration as end:
            return end.value
        yield message_of(item)


def _moved_on(version: int) -> ServiceError:
    return parity_error(
        f"the policy's tensors are no longer those that were loaded as version {version}",
        where="a restart of the engine's process",
        state="the samples of this call are dropped",
        do=f"load_weights({version + 1})",
    )
