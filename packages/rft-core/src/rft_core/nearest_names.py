"""Names that a mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_SAME_WORDS, _EACH_MORE, _ABBREVIATED = 0.92, 0.03, 0.85
"""Similarities of names that share their words, however long the names are."""


def nearest_names(name: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `count` of the known names with a similarity of at least `cutoff`, the most similar first.

    The similarity is difflib's ratio: twice the letters in matching blocks over the letters of both, from 0 to 1; upper
    and lower case are alike, and - and _. Names whose words contain all the other's words are similar whatever their
    length: `learning_rate` finds `actor_learning_rate`. So are words that begin the other's: `roll_batch` finds
    `rollout_batch_size`.
    """
    matcher = SequenceMatcher(autojunk=False)
    # difflib keeps its tables of the second sequence: they are made once for all options
    matcher.set_seq2(_plain(name))
    ranked: list[tuple[float, int, str]] = []
    for option in known:
        matcher.set_seq1(_plain(option))
        similarity = max(matcher.ratio(), _similarity_of_words(_plain(name).split("_"), _plain(option).split("_")))
        if similarity >= cutoff:
            ranked.append((-similarity, -_common_beginning(_plain(name), _plain(option)), option))
    return [option for _, _, option in sorted(ranked)[:count]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _similarity_of_words(wanted: list[str], words: list[str]) -> float:
    if set(wanted) <= set(words) or set(words) <= set(wanted):
        return _SAME_WORDS - _EACH_MORE * len(set(wanted) ^ set(words))
    return _ABBREVIATED if _abbreviates(wanted, words) else 0.0


def _abbreviates(short: list[str], words: list[str]) -> bool:
    """Return True when every word of `short`, of three letters or more, begins a word of `words`, in order."""
    rest = iter(words)
    return len(short) > 1 and all(len(part) > 2 and any(word.startswith(part) for word in rest) for part in short)


def _common_beginning(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
