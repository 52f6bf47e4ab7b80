"""Engine over a started library with a copy of the weights: calls, updates that are verified, sleep.

The library runs here (`rft_engine.vllm.engine`) or in a process of its own (`process.process_engine`): a `Backend`.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import ServiceError
from rft_engine.completions import Completion, EngineStats
from rft_engine.decoding.trie_constraint import check_constraint, check_whole, end_tokens
from rft_engine.engine_base import EngineBase, EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.process.requests import Answers, GenerateCall, SampleResult, StepCounts
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.request_checks import check_budgets, check_keys, check_media, check_prompts
from rft_engine.weight_sync.file_transport import Transport, Workers
from rft_engine.weight_sync.fingerprints import Fingerprint, compare
from rft_engine.weight_sync.weight_errors import unfinished_error


class Backend(Workers, Protocol):
    """A started library, here or in a process of its own."""

    facts: EngineFacts

    @property
    def is_alive(self) -> bool: ...

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]: ...

    def serve(self, version: int) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: list[str]) -> None: ...

    def close(self) -> None: ...


class SentWeights(Protocol):
    """The source of an update, which knows what it has sent."""

    sent: Fingerprint
    shapes: dict[str, list[int]]
    """Of the tensors that the workers hold under the names of `sent`."""


class BackendEngine(EngineBase, ABC):
    """Samples from a copy of the policy that a library holds; its subclasses say which library, and where it runs."""

    def __init__(self, settings: ExternalEngineSettings, source: SentWeights) -> None:
        """Start the library on the model directory.

        Args:
            settings: the model directory, sizes, and how the library is to run.
            source: what is sent at every `load_weights`.

        Raises:
            OptionsError: a setting that is out of range or that the library cannot carry out.
            PreflightError: the library is missing or of another release.
        """
        self._settings, self._source = settings, source
        super().__init__()
        self._fault: ServiceError | None = None
        self._awake_tags: set[str] = {"weights", "kv_cache"}
        # after everything above, which `_start` of a subclass may read
        self._backend: Backend = self._start()
        self._transport: Transport = self._make_transport()

    @abstractmethod
    def _start(self) -> Backend:
        """Start the library."""

    @abstractmethod
    def _make_transport(self) -> Transport:
        """Return the way for the source's tensors into the backend that runs now."""

    @abstractmethod
    def _plain_media(
        self, prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None
    ) -> list[dict[str, Any] | None]:
        """Return the images of each prompt as the library takes them, as JSON; empty where no prompt has any."""

    @property
    def facts(self) -> EngineFacts:
        """Facts that the started engine reported: dtype, vocabulary, transport."""
        return self._backend.facts

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self._settings.max_len

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt once for each of its keys; arguments and result as of `NativeEngine.generate`.

        Raises:
            OptionsError: a stop token that is none of the model's; a prompt that is empty, has an unknown token or
                leaves no room for `max_new_tokens`; a constraint whose ends the engine cannot detect (`end_tokens`).
            ServiceError: the engine is asleep, closed, waits for weights, passed its deadline, or
                answered what cannot be a sample.
        """
        self._require_ready()
        vocab_size = self._backend.facts.vocab_size
        options.check_vocabulary(vocab_size)
        check_keys(prompts, sample_keys)
        check_prompts(prompts, options.max_new_tokens, self._settings.max_len, vocab_size)
        check_media(prompts, media)
        allowed = check_budgets(sample_keys, budgets, options.max_new_tokens)
        if constraint is not None:
            check_constraint(constraint, options, allowed, vocab_size)
            # the tree ends every completion, so budgets need not
            allowed = [constraint.depth] * len(allowed)
            options = replace(options, stop_token_ids=tuple(end_tokens(constraint)), min_new_tokens=0)
        started = time.perf_counter()
        owners = [p for p, keys in enumerate(sample_keys) for _ in keys]
        call = GenerateCall(
            version=self.weight_version,
            options=asdict(options),
            keys=[key for keys in sample_keys for key in keys],
            prompts=[list(prompt) for prompt in prompts],
            requests=list(enumerate(owners)),
            budgets=allowed,
            constraint=None if constraint is None else constraint.as_lists(),
            media=self._plain_media(prompts, media),
        )
        self._stats, answers = EngineStats(), Answers(call, vocab_size)
        counts = self._collect(call, answers) if owners else StepCounts(0, 0)
        # refuses a call in which a sample is missing before any of it is used
        in_order = answers.in_order()
        if constraint is not None:
            check_whole(constraint, in_order)
        if owners:
            self._stats = _stats(in_order, counts, self._settings.max_rows, time.perf_counter() - started)
        completions = iter(in_order)
        return [[next(completions) for _ in keys] for keys in sample_keys]

    def load_weights(self, version: int) -> None:
        """Copy the policy's present tensors into the engine, in place, and serve them as `version`.

        What arrived is compared with what was sent, by digests of some elements of every tensor, and
        the prefix cache is dropped.

        Raises:
            ServiceError: `version` is not above the present one, the engine is closed, the tensors
                are not those of the model, or the engine does not hold them afterwards. After the last two
                the engine refuses to generate until a load succeeds.
        """
        if self.state is EngineState.CLOSED or version <= self.weight_version:
            self._states.load_weights(version)  # raises the state error
        self._update(version)
        # recorded last: a load that failed leaves the version that it had
        self._states.load_weights(version)

    def refresh(self) -> None:
        """Copy the policy's present tensors under the present version: they changed outside of a training step."""
        if self.state is EngineState.CLOSED:
            self._states.refresh()
        self._update(self.weight_version)
        self._states.refresh()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake`: 1 moves the weights to the host, 2 drops them; both drop the cache.

        Does nothing when asleep. After level 2 weights must be loaded again before generating.

        Raises:
            OptionsError: the engine cannot sleep, or was started without `enable_sleep`.
        """
        if self.state is EngineState.READY and level in (1, 2):
            # the library first: where it refuses, the engine stays awake
            self._backend_sleep(level)
        self._states.sleep(level)

    def wake(self) -> None:
        """Take the memory again. Does nothing when awake."""
        if self.state is EngineState.ASLEEP:
            self._wake_tags("weights", "kv_cache")
        self._states.wake()

    def close(self) -> None:
        """End the engine for good. Does nothing when closed."""
        if self._states.close():
            self._backend.close()

    def _collect(self, call: GenerateCall, answers: Answers) -> StepCounts:
        """Collect the results of every request of the call."""
        counts = StepCounts(0, 0)
        for result in self._backend.generate(call, self._settings.deadlines.generate):
            if isinstance(result, StepCounts):
                counts = result
            else:
                answers.add(result)
        return counts

    def _require_ready(self) -> None:
        self._states.require_ready("generate")
        if self._fault is not None:
            raise self._fault

    def _update(self, version: int) -> None:
        """Send, verify, and let the backend serve; until all of it has worked the engine refuses to generate."""
        # before the first tensor is sent: a load that breaks off leaves part old and part new
        self._fault = unfinished_error(version, "engine with a copy of the weights")
        if self.state is EngineState.ASLEEP:
            # the weights only: the cache stays free until `wake`
            self._wake_tags("weights")
        received = self._transport.send()
        self._verify(received, version)
        self._backend.serve(version)
        self._fault = None

    def _verify(self, received: Sequence[Fingerprint], version: int) -> None:
        """Compare what was sent with what each worker read, and with what it holds now."""
        sent, served = self._source.sent, self.weight_version
        for number, read in enumerate(received):
            compare(sent, read, version, served, f"that worker {number} read")
        # a worker may have read the right file and still hold the old tensor, so what it computes with is asked for too
        fingerprints = self._backend.rpc("rft_fingerprints", [self._source.shapes], self._settings.deadlines.other)
        for number, digests in enumerate(fingerprints):
            compare(sent, digests, version, served, f"that worker {number} holds")

    def _backend_sleep(self, level: int) -> None:
        self._backend.sleep(level)
        self._awake_tags = set()

    def _wake_tags(self, *tags: str) -> None:
        """Wake what is still asleep of these; weights may be awake already, for an update."""
        asleep = [tag for tag in tags if tag not in self._awake_tags]
        if asleep:
            self._backend.wake(asleep)
            self._awake_tags |= set(asleep)


def _stats(completions: Sequence[Completion], counts: StepCounts, max_rows: int, seconds: float) -> EngineStats:
    lengths = [len(completion.token_ids) for completion in completions]
    rows = min(max_rows, len(lengths))
    slots = counts.num_steps * rows
    return EngineStats(
        num_generated_tokens=sum(lengths),
        num_prefill_tokens=counts.num_prefill_tokens,
        num_decode_steps=counts.num_steps,
        mean_occupancy=min(sum(lengths) / slots, 1.0) if slots else 0.0,
        tail_ratio=max(lengths) / statistics.median(lengths),
        seconds=seconds,
        num_preemptions=counts.num_preemptions,
        rows=rows,
        rows_asked=rows,
    )
