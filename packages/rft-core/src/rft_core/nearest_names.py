"""Names that a mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_SAME_WORDS, _EACH_MORE, _ABBREVIATED = 0.92, 0.03, 0.85
"""Similarities of names that share their words, however long the names are."""
_SWAPPED = 0.9
"""Similarity of names in which two neighbouring letters have changed places."""
_REARRANGED, _SAME_PARTS = 0.95, 0.9
"""Similarity of names with the same parts in another order, and how alike their sorted parts must be for that."""


def nearest_names(name: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `count` of the known names with a similarity of at least `cutoff`, the most similar first.

    The similarity is difflib's ratio: twice the letters in matching blocks over the letters of both, from 0 to 1; upper
    and lower case are alike, and - and _. Names whose words contain all the other's words are similar whatever their
    length: `learning_rate` finds `actor_learning_rate`. So are words that begin the other's: `roll_batch` finds
    `rollout_batch_size`. Parts in another order, some of them written together, are alike: `micro_batchsize_train`
    finds `micro_train_batch_size`. A swap of two neighbouring letters counts as one slip: `gpro` finds `grpo`.
    """
    matcher = SequenceMatcher(autojunk=False)
    # difflib keeps its tables of the second sequence: they are made once for all options
    matcher.set_seq2(_plain(name))
    ranked: list[tuple[float, int, str]] = []
    for option in known:
        matcher.set_seq1(_plain(option))
        likeness = _likeness(matcher, _plain(name), _plain(option))
        if likeness >= cutoff:
            ranked.append((-likeness, -_common_beginning(_plain(name), _plain(option)), option))
    return [option for _, _, option in sorted(ranked)[:count]]


def similarity(left: str, right: str) -> float:
    """Return the similarity of two names, as `nearest_names` ranks by it."""
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(_plain(left))
    matcher.set_seq1(_plain(right))
    return _likeness(matcher, _plain(left), _plain(right))


def _likeness(matcher: SequenceMatcher[str], name: str, option: str) -> float:
    swapped = _SWAPPED if _is_swapped(name, option) else 0.0
    wanted, words = name.split("_"), option.split("_")
    return max(matcher.ratio(), swapped, _similarity_of_words(wanted, words), _similarity_of_parts(wanted, words))


def _is_swapped(left: str, right: str) -> bool:
    """Return True when two neighbouring letters have changed places: one slip, and not two wrong letters."""
    places = [place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
    if len(left) != len(right) or len(places) != 2 or places[1] != places[0] + 1:
        return False
    return left[places[0]] == right[places[1]] and left[places[1]] == right[places[0]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _similarity_of_words(wanted: list[str], words: list[str]) -> float:
    if set(wanted) <= set(words) or set(words) <= set(wanted):
        return _SAME_WORDS - _EACH_MORE * len(set(wanted) ^ set(words))
    return _ABBREVIATED if _abbreviates(wanted, words) else 0.0


def _similarity_of_parts(wanted: list[str], words: list[str]) -> float:
    """Return the similarity of the parts whatever their order, or 0 where they are not nearly the same."""
    if len(wanted) < 2 or len(words) < 2:
        return 0.0
    left, right = ("_".join(sorted(_split(one, other))) for one, other in ((wanted, words), (words, wanted)))
    alike = SequenceMatcher(None, left, right, autojunk=False)
    ratio = alike.ratio() if alike.real_quick_ratio() >= _SAME_PARTS <= alike.quick_ratio() else 0.0
    return _REARRANGED * ratio if ratio >= _SAME_PARTS else 0.0


def _split(parts: list[str], others: list[str]) -> list[str]:
    """Return the parts, one that is two of the others in a row as these: `batchsize` as `batch`, `size`."""
    pairs = {first + second: [first, second] for first in others for second in others if first and second}
    return [piece for part in parts for piece in pairs.get(part, [part])]


def _abbreviates(short: list[str], words: list[str]) -> bool:
    """Return True when every word of `short`, of three letters or more, begins a word of `words`, in order."""
    rest = iter(words)
    return len(short) > 1 and all(len(part) > 2 and any(word.startswith(part) for word in rest) for part in short)


def _common_beginning(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
