"""An engine with a process and weights of its own (vLLM, SGLang) as one of several replicas.

It draws samples from their first token to their last: nothing is interrupted, so a new version waits until
the samples under way have ended (`--async_deterministic`). It starts its process again by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.weight_sync.fingerprints import WeightProvider
from rft_engine.weight_sync.shared_memory import WeightSnapshot


class ExternalEngine(Protocol):
    """Engine methods that a replica needs."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def weight_version(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]: ...

    def load_weights(self, version: int) -> None: ...

    def refresh(self) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ExternalEngineReplica:
    """Replica around an external engine, loaded from weight snapshots, so that a restart has the same ones."""

    can_resume = False
    reads_files = False

    def __init__(self, number: int, make_engine: Callable[[WeightProvider], ExternalEngine]) -> None:
        """Keep what makes the engine; `ready` makes it, which starts its process."""
        self.number, self._make_engine = number, make_engine
        self._weights: WeightSnapshot | None = None
        self._made: ExternalEngine | None = None

    @property
    def facts(self) -> EngineFacts:
        """Facts that the started engine reported."""
        return self._engine.facts

    def ready(self) -> None:
        """Make the engine where there is none yet, and wait until it has started.

        Raises:
            ServiceError: it did not start.
        """
        if self._made is None:
            self._made = self._make_engine(self._tensors)

    def load(self, snapshot: WeightSnapshot) -> None:
        """Serve these weights; the engine compares digests itself."""
        # first: the engine asks `_tensors` for them, now and whenever it starts its process again
        self._weights = snapshot
        if snapshot.version > self._engine.weight_version:
            self._engine.load_weights(snapshot.version)
        else:
            self._engine.refresh()

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]:
        """Yield the results of a call once all of it is done."""
        assert not any(call.starts), "samples are drawn whole"
        # requests with equal contexts are samples of one prompt, which the engine reads once
        same: dict[tuple[int, ...], list[int]] = {}
        for request, context in enumerate(call.contexts()):
            same.setdefault(context, []).append(request)
        answers = self._engine.generate(
            [list(call.prefixes[together[0]]) for together in same.values()],
            [[call.keys[request] for request in together] for together in same.values()],
            call.options,
            budgets=[[call.budgets[request] for request in together] for together in same.values()],
            constraint=call.constraint,
            media=_media_of(call, [together[0] for together in same.values()]),
        )
        for together, completions in zip(same.values(), answers, strict=True):
            for request, one in zip(together, completions, strict=True):
                yield SampledTokens(
                    request, one.token_ids, one.logprobs, one.log_kept_mass, one.finish_reason, one.weight_version
                )

    def interrupt(self) -> None:
        """Do nothing: samples of an external engine run to their end."""

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        """Load the newest weights: an engine starts a process that is gone again, and is made where there is none."""
        self.ready()
        self.load(newest())

    def sleep(self, level: int) -> None:
        """Put the engine to sleep at this level."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Wake the engine after `sleep`."""
        self._engine.wake()

    def close(self) -> None:
        """Close the engine for good, where there is one."""
        if self._made is not None:
            self._made.close()

    @property
    def _engine(self) -> ExternalEngine:
        assert self._made is not None, "ready() comes first"
        return self._made

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self._weights is not None, "load() comes first"
        return self._weights.tensors()


def _media_of(call: SampleRequests, requests: Sequence[int]) -> list[object | None] | None:
    """Images of these requests' prompts; None where the call has none."""
    if not call.shown:
        return None
    indices = [call.media_of(request) for request in requests]
    return [call.shown[index].media if index >= 0 else None for index in indices]
