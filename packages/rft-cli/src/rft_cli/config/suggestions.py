"""Suggestions of known names for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(left: str, right: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn `left` into `right`.

    The optimal string alignment distance: no part of the text is edited twice.
    """
    before, row = list(range(len(right) + 1)), list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        older, before, row = before, row, [i] + [0] * len(right)
        for j, b in enumerate(right, start=1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Up to `count` of the known names that `name` may have meant, the likeliest first.

    A name whose words contain all the other's words counts as near, whatever its length:
    `learning_rate` finds `actor_learning_rate`. So does one whose words begin the other's: `roll_batch`
    finds `rollout_batch_size`.
    """
    wanted = name.lower().replace("-", "_")
    ranked = sorted((_distance(wanted, option.lower().replace("-", "_")), option) for option in known)
    if not ranked or ranked[0][0][0] > max(2.0, len(wanted) * 0.4):
        return []
    limit = max(3.0, len(wanted) * 0.6)
    return [option for distance, option in ranked if distance[0] <= limit][:count]


def _distance(wanted: str, option: str) -> tuple[float, int]:
    letters = float(edit_distance(wanted, option))
    wanted_words, option_words = set(wanted.split("_")), set(option.split("_"))
    if wanted_words <= option_words or option_words <= wanted_words:
        letters = min(letters, 1.5 + 0.5 * len(wanted_words ^ option_words))
    if _abbreviates(wanted.split("_"), option.split("_")):
        letters = min(letters, 2.0)
    common = next((i for i, (a, b) in enumerate(zip(wanted, option, strict=False)) if a != b), len(wanted))
    return letters, -common


def _abbreviates(short: list[str], words: list[str]) -> bool:
    """Return True when every word of `short`, of three letters or more, begins a word of `words`, in order."""
    rest = iter(words)
    return len(short) > 1 and all(len(part) > 2 and any(word.startswith(part) for word in rest) for part in short)
