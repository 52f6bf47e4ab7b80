"""Test double of asynchronous engines: a bigram policy sampled with keyed numbers, one token a sample in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.keyed_random import uniforms
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, FakeCompletion


@dataclass(frozen=True, slots=True)
class FakeDrawn:
    """New tokens of one fake request."""

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    finish_reason: str
    weight_version: int


class BigramAsyncEngine:
    """Fake engine on copies of a policy's table by version; `pause` seconds pass between two tokens of all samples.

    `fail` is called before every round of tokens, so that a test may raise there.
    """

    def __init__(self, policy: BigramPolicy, *, pause: float = 0.0) -> None:
        self._policy, self.pause = policy, pause
        self._tables = {0: policy.table.detach().clone()}
        self.weight_version = 0
        self.fail: Callable[[], None] = lambda: None
        self.served: list[int] = []
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        """(version, keys) of every draw."""
        self.is_closed = False

    def publish(self, version: int) -> None:
        """Snapshot the table as it is now."""
        self._tables[version] = self._policy.table.detach().clone()

    def serve(self, version: int) -> None:
        """Serve this version; older ones are dropped."""
        # no older version is asked for again
        self._tables = {kept: table for kept, table in self._tables.items() if kept >= version}
        self.weight_version = version
        self.served.append(version)

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        options: SamplingOptions,
        *,
        media: Sequence[object | None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[FakeDrawn]:
        """Sample one token of every request in turn, until they end or `stop()` is true."""
        del media
        temperature, stop_token_ids = options.temperature, options.stop_token_ids
        self.calls.append((self.weight_version, tuple(keys)))
        table = (self._tables[self.weight_version] / (temperature or 1.0)).log_softmax(-1)
        drawn: dict[int, tuple[list[int], list[float]]] = {i: ([], []) for i in range(len(keys))}
        left = set(drawn)
        while left and not (stop and stop()):
            self.fail()
            time.sleep(self.pause)
            for i in sorted(left):
                tokens, logprobs = drawn[i]
                last = tokens[-1] if tokens else prefixes[i][-1]
                # by the place in the response: an interrupted sample goes on with the numbers that it would have had
                index = starts[i] + len(tokens)
                cumulative = table[last].double().exp().cumsum(0)
                uniform = uniforms([keys[i]], 1, index)[0, 0] * cumulative[-1]
                sampled = int(torch.searchsorted(cumulative, uniform, right=True))
                tokens.append(sampled if temperature else int(table[last].argmax()))
                logprobs.append(float(table[last, tokens[-1]]))
                if tokens[-1] in stop_token_ids or len(tokens) == budgets[i]:
                    left.discard(i)
                    reason = "stop" if tokens[-1] in stop_token_ids else "length"
                    yield self._result(i, tokens, logprobs, reason)
        for i in sorted(left):
            yield self._result(i, *drawn[i], "interrupted")

    def _result(self, request: int, tokens: Sequence[int], logprobs: Sequence[float], reason: str) -> FakeDrawn:
        zeros = (0.0,) * len(tokens)
        return FakeDrawn(request, tuple(tokens), tuple(logprobs), zeros, reason, self.weight_version)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[FakeCompletion]]:
        """Generate complete completions with the served version."""
        frozen = BigramPolicy(self._policy.table.shape[0], dtype=self._policy.table.dtype)
        with torch.no_grad():
            frozen.table.copy_(self._tables[self.weight_version])
        engine = BigramEngine(frozen)
        engine.version = self.weight_version
        return engine.generate(prompts, sample_keys, options, budgets=budgets, constraint=constraint, media=media)

    def load_weights(self, version: int) -> None:
        """Publish the table and serve it."""
        self.publish(version)
        self.serve(version)

    def sleep(self, level: int = 1) -> None:
        """Do nothing: there is no memory to release."""

    def wake(self) -> None:
        """Do nothing: there is no memory to restore."""

    def counters(self) -> Mapping[str, float]:
        """Return no metrics: this engine has no counters."""
        return {}

    def close(self) -> None:
        """Record that the engine was closed."""
        self.is_closed = True
