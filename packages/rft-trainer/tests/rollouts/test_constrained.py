"""An engine within a tree: every call has the tree, and all else reaches the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_trainer.rollouts.constrained import BeamEngine, ConstrainedEngine, RenormalisedEngine

TRIE, OTHER = TokenTrie.of([[1, 2]]), TokenTrie.of([[3]])


class Engine:
    """Keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def generate(self, *arguments: Any, **options: Any) -> list[Any]:
        self.calls.append((arguments, options))
        return ["completions"]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def test_every_call_has_the_tree_unless_it_has_its_own() -> None:
    engine: Any = Engine()
    constrained, options = ConstrainedEngine(engine, TRIE), SamplingOptions(temperature=1.0, max_new_tokens=2)
    assert constrained.generate([[1]], [[5]], options, budgets=[[2]], media=[None]) == ["completions"]
    constrained.generate([[1]], [[5]], options, constraint=OTHER)
    (first, kept), (_, given) = engine.calls
    assert first == ([[1]], [[5]], options)
    assert kept == {"budgets": [[2]], "constraint": TRIE, "media": [None]}
    assert given["constraint"] is OTHER


def test_weights_and_memory_are_the_engines_own() -> None:
    engine: Any = Engine()
    constrained = ConstrainedEngine(engine, TRIE)
    constrained.load_weights(3)
    constrained.refresh()
    constrained.sleep(2)
    constrained.wake()
    assert engine.calls == [("load_weights", 3), ("refresh",), ("sleep", 2), ("wake",)]


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = (-1.0, -3.0)
    log_kept_mass: tuple[float, ...] = (-0.25, -3.0000001)
    finish_reason: str = "stop"
    weight_version: int = 4


class Searching(Engine):
    """Finds as many beams as it is asked for."""

    def beam_search(self, prompts: Any, trie: TokenTrie, *, num_beams: int, **options: Any) -> list[list[Beam]]:
        self.calls.append((prompts, trie, num_beams, options))
        return [[Beam((prompt[0], place)) for place in range(num_beams)] for prompt in prompts]


def test_beams_take_the_place_of_samples_one_a_key() -> None:
    engine: Any = Searching()
    beams, options = BeamEngine(engine, TRIE), SamplingOptions(temperature=0.0, max_new_tokens=2)
    found = beams.generate([[7], [8], [9]], [[0, 1], [0], [5, 6]], options)
    assert [[one.token_ids for one in row] for row in found] == [[(7, 0), (7, 1)], [(8, 0)], [(9, 0), (9, 1)]]
    # prompts that ask for as many share a search
    assert [(prompts, width) for prompts, _, width, _ in engine.calls] == [([[8]], 1), ([[7], [9]], 2)]
    assert engine.calls[0][3] == {"temperature": 1.0, "mass": "allowed"}
    beams.generate([[7]], [[0]], replace(options, temperature=0.5), constraint=OTHER)
    assert engine.calls[-1][1] is OTHER
    assert engine.calls[-1][3]["temperature"] == 0.5


def test_beams_after_images_are_refused() -> None:
    engine: Any = Searching()
    with pytest.raises(OptionsError, match="prompts with images"):
        BeamEngine(engine, TRIE).generate(
            [[7]], [[0]], SamplingOptions(temperature=1.0, max_new_tokens=2), media=[object()]
        )


def test_logprobs_are_those_among_what_may_follow() -> None:
    engine: Any = Searching()
    renormalised = RenormalisedEngine(BeamEngine(engine, TRIE))
    [[found]] = renormalised.generate([[7]], [[0]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    assert found.token_ids == (7, 0)
    # a token without an alternative has probability 1, whatever is rounded
    assert found.logprobs == (-0.75, 0.0)
    assert found.log_kept_mass == (0.0, 0.0)
    assert (found.finish_reason, found.weight_version) == ("stop", 4)
    renormalised.load_weights(3)
    renormalised.sleep(2)
    renormalised.wake()
    assert engine.calls[1:] == [("load_weights", 3), ("sleep", 2), ("wake",)]
