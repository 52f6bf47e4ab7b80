"""Samples of a store as a sequence: each is made from the memory map when it is asked for, and kept by nobody."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from rft_trainer.data.store.shards import ShardFacts, open_shard
from rft_trainer.records.rollouts import TrainingSample


class StoredSamples(Sequence[TrainingSample]):
    """All samples of a store, or those of some indices; memory is that of the pages that are read.

    Example::

        samples = StoredSamples(directory, published_shards(directory), ["train"])
        samples[3].sample_id          # "train:3", where no row before it was left out
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[ShardFacts],
        sources: Sequence[str],
        indices: Iterable[int] | None = None,
    ) -> None:
        """Map the shards; `indices` choose among the samples, None = all of them in order."""
        self._arguments = (directory, shards, sources)
        self._sources = sources
        self._ends = list(accumulate(facts.num_samples for facts in shards))
        self._shards = [_MappedShard(open_shard(directory, number)) for number in range(len(shards))]
        # eight bytes a sample, where a list of numbers has four times that
        self._indices = None if indices is None else array("q", indices)

    def __len__(self) -> int:
        """Return the number of samples."""
        if self._indices is not None:
            return len(self._indices)
        return self._ends[-1] if self._ends else 0

    def picked(self, indices: Iterable[int]) -> StoredSamples:
        """Return those at these indices, in this order."""
        return StoredSamples(*self._arguments, indices)

    @overload
    def __getitem__(self, index: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSample]: ...
    def __getitem__(self, index: int | slice) -> TrainingSample | list[TrainingSample]:
        """Make the sample, or the list of samples, from the tokens on disk."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        shard, row = self._place(index)
        return self._shards[shard].sample(row, self._sources)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its number there."""
        number = range(len(self))[index]
        place = number if self._indices is None else self._indices[number]
        shard = bisect_right(self._ends, place)
        return shard, place - (self._ends[shard - 1] if shard else 0)

    def num_response_tokens(self, index: int) -> int:
        """Return the length of a response, for which its tokens are not read."""
        shard, row = self._place(index)
        return self._shards[shard].num_response_tokens(row)

    def recorded(self, index: int) -> tuple[str, int, tuple[int, ...], bytes]:
        """Return (source, number of the row in it, tokens, record) of a sample, of a store that has records."""
        shard, row = self._place(index)
        source, number, token_ids, record = self._shards[shard].recorded(row)
        return self._sources[source], number, token_ids, record

    def prompt_keys(self) -> Any:
        """Return [N] uint64, the hash of the prompt of each sample, of a store that has them."""
        keys = np.concatenate([shard.prompt_keys for shard in self._shards])
        return keys if self._indices is None else keys[np.asarray(self._indices)]

    def sizes(self, num_sources: int) -> tuple[int, ...]:
        """Return the number of samples of each source in the whole store."""
        sizes = [0] * num_sources
        for shard in self._shards:
            for source, count in shard.num_by_source():
                sizes[source] += count
        return tuple(sizes)


class _MappedShard:
    """Columns of a shard as arrays over the memory map."""

    def __init__(self, batch: Any) -> None:
        source, index, prompt_length, weight, token_ids, loss_mask, *beside = batch.columns
        self._source = source
        self._scalars = [_array(column) for column in (source, index, prompt_length, weight)]
        self._token_ends, self._token_ids = _array(token_ids.offsets), _array(token_ids.values)
        # bits, which no array of numpy holds
        self._mask_ends, self._mask = _array(loss_mask.offsets), loss_mask.values
        self._prompt_length = _array(prompt_length)
        self._records = beside[0] if beside and batch.schema.names[-2] == "record" else None
        has_numbers = beside and self._records is None
        self._numbers = _array(beside[0].values).reshape(len(source), -1) if has_numbers else None
        self.prompt_keys = _array(beside[1]) if beside else np.zeros(len(source), np.uint64)

    def num_by_source(self) -> list[tuple[int, int]]:
        return [(entry["values"], entry["counts"]) for entry in self._source.value_counts().to_pylist()]

    def num_response_tokens(self, row: int) -> int:
        return int(self._token_ends[row + 1] - self._token_ends[row] - self._prompt_length[row])

    def recorded(self, row: int) -> tuple[int, int, tuple[int, ...], bytes]:
        assert self._records is not None, "the samples have no records"
        source, index = self._scalars[:2]
        return source.item(row), index.item(row), self._tokens(row), self._records[row].as_py()

    def _tokens(self, row: int) -> tuple[int, ...]:
        first, last = self._token_ends[row : row + 2]
        return tuple(self._token_ids[first:last].tolist())

    def sample(self, row: int, sources: Sequence[str]) -> TrainingSample:
        source, index, prompt_length, weight = [column.item(row) for column in self._scalars]
        begin, end = self._mask_ends[row : row + 2].tolist()
        return TrainingSample(
            f"{sources[source]}:{index}",
            self._tokens(row),
            prompt_length,
            0.0,
            # most samples have no mask, and reading none costs as much as reading one
            loss_mask=tuple(self._mask.slice(begin, end - begin).to_pylist()) if end > begin else (),
            weight=weight,
            sequence_numbers=() if self._numbers is None else tuple(self._numbers[row].tolist()),
        )


def _array(column: Any) -> Any:
    """Return a column of numbers as an array over the same memory; `to_numpy` loads pandas, which takes a second."""
    kind = np.dtype(str(column.type))
    if not len(column):
        return np.zeros(0, kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)
