"""An engine within a tree: every call has the tree, and all else reaches the engine."""

from __future__ import annotations

from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_trainer.rollouts.constrained import ConstrainedEngine

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
