"""Published algorithms as a table of the help. No torch is imported here."""

from __future__ import annotations

import inspect
import re

from rft_algos.algorithms.published import ALIASES, PUBLISHED


def algorithm_table() -> list[tuple[str, dict[str, str]]]:
    """Return the names of each published algorithm with the first sentence about it."""
    rows: dict[str, str] = {}
    for kind in PUBLISHED:
        names = [kind.name, *(alias for alias, target in ALIASES.items() if target == kind.name)]
        about = " ".join((inspect.getdoc(kind) or "").split()).partition(". ")[0].rstrip(".")
        rows[", ".join(names)] = re.sub(r" \(arXiv [^)]*\)", "", about)  # docs/algorithms.md has the sources
    return [("algorithms: --advantage_estimator NAME", rows)]
