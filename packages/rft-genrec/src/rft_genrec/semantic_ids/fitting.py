"""The methods of `--method`: vectors and settings to a quantiser."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from torch import Tensor

from rft_algos.quantisation.kmeans import Clusters, kmeans
from rft_algos.quantisation.residual import residual_kmeans
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_genrec.semantic_ids.codebooks import Quantiser
from rft_genrec.settings.sid import QuantiserSettings, SidSettings

Fitted = Generator[str, None, Quantiser]
"""Lines on the way; then the quantiser."""


def code_sizes(settings: QuantiserSettings) -> tuple[int, ...]:
    """Return the number of codes of each level.

    Raises:
        OptionsError: no numbers, or another count of them than of levels.
    """
    words = settings.codes.replace(" ", "").split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(words) not in (1, settings.levels):
        raise OptionsError(
            code="genrec.codes",
            what=f"codes = {settings.codes} for levels = {settings.levels}",
            where="--codes",
            why="one number above 0 for all levels, or one for each level, joined by commas",
            do=f"--codes {','.join(['256'] * settings.levels)}",
        )
    return tuple(int(word) for word in words) if len(words) > 1 else (int(words[0]),) * settings.levels


def fit(points_ND: Tensor, settings: SidSettings, *, key: int) -> Fitted:
    """Fit a quantiser by the method of the settings."""
    sizes, method = code_sizes(settings.quantiser), settings.quantiser.method
    if max(sizes) > len(points_ND):
        raise OptionsError(
            code="genrec.too_many_codes",
            what=f"{max(sizes)} codes for {len(points_ND)} items that are fitted",
            where="--codes",
            why="a code is a point among the items: there are at most as many as items",
            do=f"--codes {max(1, len(points_ND) // 4)}",
        )
    level = partial(_plain, iterations=settings.quantiser.kmeans_iterations)
    yield f"{method}: levels of {', '.join(map(str, sizes))} codes on {len(points_ND):,} items"
    found = residual_kmeans(points_ND, sizes, key=derive_key(key, method), cluster=level)
    if any(found.num_revived):
        yield f"empty codes moved to the farthest items, by level: {', '.join(map(str, found.num_revived))}"
    return Quantiser(method, found.codebooks)


def _plain(points_ND: Tensor, num: int, key: int, *, iterations: int) -> Clusters:
    return kmeans(points_ND, num, key=key, max_iterations=iterations)
