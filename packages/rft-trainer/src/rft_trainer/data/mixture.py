"""Order of the prompts of an epoch: a function of (seed, epoch) with no hidden state.

A position in an epoch is found again by computing the order anew, so a resumed run, another
number of ranks or of workers sees the same prompts in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import KeyedOrder, derive_key, permutation, uniforms


class Mixture:
    """One or several sources of prompts, addressed by one global index: source 0 first, then source 1, ...

    Without probabilities an epoch is a keyed permutation of all prompts: each exactly once.
    With probabilities an epoch has as many draws as there are prompts. Each draw takes a source
    by its probability, and then the next prompt of that source's keyed permutation, which is
    made anew each time it has been walked through: prompts of one source never differ by more
    than one visit.

    Args:
        sizes: prompts of each source.
        probabilities: one a source, positive, with sum 1; `None` for a plain permutation.
        most_in_memory: prompts above which a plain permutation is another one, which is computed place by place and
            takes no memory (`KeyedOrder`); `None` = never. Draws by probabilities are in memory in any case.

    Raises:
        DataError: a source without prompts. OptionsError: probabilities that do not fit.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        probabilities: Sequence[float] | None = None,
        *,
        most_in_memory: int | None = None,
    ) -> None:
        self.sizes = tuple(int(size) for size in sizes)
        for number, size in enumerate(self.sizes):
            if size < 1:
                raise _empty_source(number)
        if not self.sizes:
            raise _empty_source(0)
        self.probabilities = None if probabilities is None else check_probabilities(probabilities, len(self.sizes))
        is_plain = self.probabilities is None or len(self.sizes) == 1
        self._by_place = is_plain and most_in_memory is not None and self.num_prompts > most_in_memory
        self._cached: tuple[int, int] | None = None
        self._cached_order: Tensor = torch.empty(0, dtype=torch.int64)

    @property
    def num_prompts(self) -> int:
        """Number of prompts of an epoch."""
        return sum(self.sizes)

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return [N] int64: the global index of the prompt at every position of the epoch; read only."""
        if self._cached != (seed, epoch):
            self._cached_order = self._draw(seed, epoch)
            self._cached = (seed, epoch)
        return self._cached_order

    def sequence(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the order of an epoch as numbers; computed block by block where it is keyed place by place."""
        if self._by_place:
            return KeyedOrder(derive_key(seed, "order", epoch), self.num_prompts)
        return self.order(seed, epoch).tolist()

    def _draw(self, seed: int, epoch: int) -> Tensor:
        if self.probabilities is None or len(self.sizes) == 1:
            return permutation(derive_key(seed, "order", epoch), self.num_prompts)
        sources_N = self._sources(seed, epoch)
        order_N = torch.empty_like(sources_N)
        first = 0
        for source, size in enumerate(self.sizes):
            positions = (sources_N == source).nonzero().flatten()
            # source by source: which of its prompts comes next depends on no other source's draws
            order_N[positions] = first + _walk(seed, epoch, source, size, len(positions))
            first += size
        return order_N

    def _sources(self, seed: int, epoch: int) -> Tensor:
        assert self.probabilities is not None
        # without the last bound, which rounding may leave below 1: a draw above it would name no source
        bounds = torch.tensor(self.probabilities, dtype=torch.float64).cumsum(0)[:-1].contiguous()
        draws = uniforms([derive_key(seed, "source", epoch)], self.num_prompts)[0]
        return torch.searchsorted(bounds, draws, right=True)


def _walk(seed: int, epoch: int, source: int, size: int, num: int) -> Tensor:
    """Return the first `num` indices of a source's permutations, one after the other."""
    # whole permutations one after the other, so that no prompt comes twice before all came once
    passes = [permutation(derive_key(seed, "order", epoch, source, turn), size) for turn in range(-(-num // size))]
    return torch.cat(passes)[:num] if passes else torch.empty(0, dtype=torch.int64)


def check_probabilities(probabilities: Sequence[float], num_sources: int) -> tuple[float, ...]:
    """Check probabilities and return them, or raise `OptionsError`: one a source, each above 0, sum 1 to 1e-6."""
    values = tuple(float(p) for p in probabilities)
    shown = ",".join(f"{p:g}" for p in values)
    if len(values) != num_sources:
        even = ",".join(f"{1 / num_sources:.6g}" for _ in range(num_sources - 1))
        rest = 1 - (num_sources - 1) * float(f"{1 / num_sources:.6g}")
        raise _bad_probabilities(
            f"{len(values)} probabilities ({shown}) for {num_sources} sources",
            ",".join(part for part in (even, f"{rest:.6g}") if part),
        )
    # NaN fails both comparisons, so it is refused too
    positive = [p for p in values if p > 0 and p < float("inf")]
    if len(positive) != len(values):
        raise _bad_probabilities(f"{shown}: each must be a number above 0", "", "leave the source out of --prompt_data")
    if abs(sum(values) - 1.0) > 1e-6:
        # the last is what is left, so that the numbers of the remedy sum to 1 as they are written
        scaled = [float(f"{p / sum(values):.6g}") for p in values[:-1]]
        raise _bad_probabilities(
            f"{shown} sum to {sum(values):g}", ",".join(f"{p:g}" for p in (*scaled, 1 - sum(scaled)))
        )
    return values


def _bad_probabilities(what: str, values: str, do: str = "") -> OptionsError:
    return OptionsError(
        code="data.probabilities",
        what=f"prompt_data_probs = {what}",
        where="--prompt_data_probs",
        why="there is one probability a source, each above 0, and they sum to 1",
        do=do or f"--prompt_data_probs {values}",
    )


def _empty_source(number: int) -> DataError:
    return DataError(
        code="data.empty_source",
        what=f"source {number} has 0 prompts",
        where="--prompt_data",
        why="every source must give at least one prompt",
        do="leave the source out of --prompt_data",
    )
