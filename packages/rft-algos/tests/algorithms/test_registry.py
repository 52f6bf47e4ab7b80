"""Components by the words of a command."""

from __future__ import annotations

from rft_algos.algorithms import components, corrections
from rft_algos.algorithms.components import Surrogate
from rft_algos.algorithms.corrections import Correction
from rft_algos.algorithms.registry import component_of, components_by_flag


def test_a_word_names_a_component_of_its_kind_alone() -> None:
    surrogates, by_word = components_by_flag(Surrogate), components_by_flag(Correction)
    assert surrogates["gspo"] is components.Gspo
    assert by_word["icepop"] is by_word["mis"]
    assert all(issubclass(one, Surrogate) for one in surrogates.values())
    assert all(issubclass(one, Correction) for one in by_word.values())
    assert surrogates.keys().isdisjoint(by_word)
    words = {word for one in vars(corrections).values() for word in getattr(one, "flags", {})}
    assert words <= by_word.keys()


def test_a_word_sets_what_differs_from_the_published_component() -> None:
    assert component_of(Surrogate, "dppo_tv") == components_by_flag(Surrogate)["dppo_tv"]()
    assert component_of(Surrogate, "dppo_kl").divergence == "kl"  # type: ignore[attr-defined]
