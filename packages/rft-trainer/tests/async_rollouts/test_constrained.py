"""Samples that run ahead within a tree: log-probs, interrupted ones, and what reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_trainer.async_rollouts.constrained import ConstrainedAsyncEngine

TRIE, OTHER = TokenTrie.of([[1, 2]]), TokenTrie.of([[3]])
OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=2)


class Engine:
    """Draws one whole sample and one that is interrupted; notes what it is asked."""

    weight_version = 7

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def draw(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self.asked.append((arguments, options))
        yield self._drawn(0, (1, 2), "stop")
        yield self._drawn(1, (1,), "interrupted")

    def generate(self, *arguments: Any, **options: Any) -> str:
        self.asked.append((arguments, options))
        return "completions"

    def _drawn(self, request: int, tokens: tuple[int, ...], reason: str) -> Any:
        return SimpleNamespace(
            request=request,
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            log_kept_mass=(-0.25,) * len(tokens),
            finish_reason=reason,
            weight_version=7,
        )


@pytest.mark.parametrize(("renormalised", "logprob", "mass"), [(True, -0.75, 0.0), (False, -1.0, -0.25)])
def test_a_whole_sample_is_given_and_an_interrupted_one_begins_again(
    renormalised: bool, logprob: float, mass: float
) -> None:
    engine: Any = Engine()
    constrained = ConstrainedAsyncEngine(engine, TRIE, renormalised=renormalised)
    whole, interrupted = constrained.draw([[4], [4]], [8, 9], [0, 0], [2, 2], OPTIONS, stop=None)
    assert (whole.request, whole.token_ids, whole.finish_reason) == (0, (1, 2), "stop")
    assert (whole.logprobs, whole.log_kept_mass) == ((logprob,) * 2, (mass,) * 2)
    assert (interrupted.request, interrupted.token_ids, interrupted.logprobs) == (1, (), ())
    assert interrupted.finish_reason == "interrupted"
    [(arguments, options)] = engine.asked
    assert arguments == ([[4], [4]], [8, 9], [0, 0], [2, 2], OPTIONS)
    assert options == {"media": None, "stop": None, "constraint": TRIE}


def test_evaluations_are_within_the_tree_and_all_else_is_the_engines_own() -> None:
    engine: Any = Engine()
    constrained: Any = ConstrainedAsyncEngine(engine, TRIE, renormalised=True)
    assert constrained.generate([[4]], [[8]], OPTIONS) == "completions"
    constrained.generate([[4]], [[8]], OPTIONS, constraint=OTHER)
    assert [options["constraint"] for _, options in engine.asked] == [TRIE, OTHER]
    assert constrained.weight_version == 7
