"""Order of the prompts of an epoch: a function of (seed, epoch) with no hidden state.

A position in an epoch is found again by computing the order anew, so a resumed run, another
number of ranks or of workers sees the same prompts in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import KeyedOrder, derive_key, permutation, permuted, uniforms

_BLOCK = 4096
_WEIGHT_UNIT = 1 << 40


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
        most_in_memory: prompts above which the order is another one, which is computed place by place and takes no
            memory: a `KeyedOrder` without probabilities, a `WeightedOrder` with them; `None` = never.

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
        self._by_place = most_in_memory is not None and self.num_prompts > most_in_memory
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
        if not self._by_place:
            return self.order(seed, epoch).tolist()
        if self.probabilities is None or len(self.sizes) == 1:
            return KeyedOrder(derive_key(seed, "order", epoch), self.num_prompts)
        return WeightedOrder(self.sizes, self.probabilities, seed, epoch)

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


class WeightedOrder(Sequence[int]):
    """The order of an epoch by probabilities, a block of which is computed at a time; a function of the place alone.

    Before place n, source s of probability p_s has had n p_s draws, to within one a source: the first source has the
    whole part of n p_1, the second its share of the rest, and so on. Within a block of 4096 places the sources stand in
    a keyed order. The k-th draw of a source of M prompts is at place k mod M of its keyed permutation number k div M.

    Args:
        sizes: prompts of each source.
        probabilities: one a source, with sum 1.
        seed: of the run.
        epoch: number of the epoch.
    """

    def __init__(self, sizes: Sequence[int], probabilities: Sequence[float], seed: int, epoch: int) -> None:
        self._sizes, self._num = tuple(sizes), sum(sizes)
        # whole numbers, so that every machine counts the same draws
        weights = [max(1, round(p * _WEIGHT_UNIT)) for p in probabilities]
        self._weights = [(weight, sum(weights[number:])) for number, weight in enumerate(weights)]
        self._seed, self._epoch = seed, epoch
        self._first, self._block = 0, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Return the number of draws, that of all prompts."""
        return self._num

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return the global index of the prompt at a place, or those of a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._num))]
        place = range(self._num)[index]
        if not 0 <= place - self._first < len(self._block):
            self._first = place - place % _BLOCK
            self._block = self._draw(self._first, min(self._first + _BLOCK, self._num))
        return int(self._block[place - self._first])

    def draws_before(self, place: int) -> list[int]:
        """Return how many draws before a place each source has."""
        counts: list[int] = []
        left = place
        for weight, weight_left in self._weights:
            # a share of a number that never falls never falls: no block has less than none of a source
            counts.append(left * weight // weight_left)
            left -= counts[-1]
        return counts

    def _draw(self, first: int, stop: int) -> Tensor:
        before, behind = self.draws_before(first), self.draws_before(stop)
        key = derive_key(self._seed, "source", self._epoch, first // _BLOCK)
        places = permutation(key, stop - first)
        order = torch.empty(stop - first, dtype=torch.int64)
        offset = taken = 0
        for source, size in enumerate(self._sizes):
            num = behind[source] - before[source]
            draws = torch.arange(before[source], behind[source])
            # the places of a source in their own order, so that its permutation is walked through in turn
            order[places[taken : taken + num].sort().values] = offset + self._prompts(source, size, draws)
            offset, taken = offset + size, taken + num
        return order

    def _prompts(self, source: int, size: int, draws: Tensor) -> Tensor:
        prompts = torch.empty_like(draws)
        for turn in range(int(draws[0]) // size, int(draws[-1]) // size + 1) if len(draws) else ():
            mine = (draws // size == turn).nonzero().flatten()
            key = derive_key(self._seed, "order", self._epoch, source, turn)
            prompts[mine] = permuted(key, size, draws[mine] % size)
        return prompts


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
