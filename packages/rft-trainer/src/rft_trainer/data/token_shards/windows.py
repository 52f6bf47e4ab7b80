"""Windows over streams of tokens: each is made from the memory map when it is asked for, and kept by nobody."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import overload

import numpy as np

from rft_trainer.data.token_shards.stream_building import BuiltStream
from rft_trainer.data.token_shards.token_file import open_token_shard
from rft_trainer.records.rollouts import TrainingSample


class TokenStream:
    """The tokens of a stream as one sequence, over the memory maps of its shards."""

    def __init__(self, built: BuiltStream) -> None:
        self._shards = [open_token_shard(built.directory, facts.number) for facts in built.shards]
        self._ends = [*accumulate(facts.num_tokens for facts in built.shards)]
        self._bytes_before = [0, *accumulate(facts.num_bytes for facts in built.shards)]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._ends[-1]

    def tokens(self, begin: int, end: int) -> list[int]:
        """Return the ids of the tokens from `begin` to before `end`."""
        parts = [self._shards[shard].token_ids[first:last] for shard, first, last, _ in self._parts(begin, end)]
        return parts[0].tolist() if len(parts) == 1 else np.concatenate(parts).tolist()

    def document_starts(self, begin: int, end: int) -> list[int]:
        """Return the places of the end tokens from `begin` to before `end` with which a document begins."""
        found: list[int] = []
        for shard, first, last, offset in self._parts(begin, end):
            starts = self._shards[shard].document_starts
            low, high = np.searchsorted(starts, [first, last])
            found += (starts[low:high] + offset).tolist()
        return found

    def bytes_before(self, place: int) -> tuple[int, int]:
        """Return (bytes of the text of all whole pieces before a token, the token with which the next piece begins)."""
        shard = min(bisect_right(self._ends, place), len(self._shards) - 1)
        offset = self._ends[shard - 1] if shard else 0
        opened = self._shards[shard]
        piece = int(np.searchsorted(opened.piece_ends, place - offset, side="right"))
        if not piece:
            return self._bytes_before[shard], offset
        return self._bytes_before[shard] + int(opened.piece_bytes[piece - 1]), offset + int(
            opened.piece_ends[piece - 1]
        )

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (shard, first token in it, token behind the last, tokens before the shard)."""
        shard = bisect_right(self._ends, begin)
        while begin < end:
            offset = self._ends[shard - 1] if shard else 0
            last = min(end, self._ends[shard])
            if last > begin:
                yield shard, begin - offset, last - offset, offset
            begin, shard = max(begin, last), shard + 1


@dataclass(frozen=True, slots=True)
class StreamWindows:
    """The first windows of a stream."""

    name: str
    """Of the source, with which the ids of its samples begin."""
    stream: TokenStream
    content_hash: str
    num_windows: int
    num_tokens: int
    """Tokens of these windows, each counted once."""
    num_bytes: int
    """Of their text as UTF-8."""


class TokenWindows(Sequence[tuple[TrainingSample, ...]]):
    """Windows of a number of tokens over one stream or several, source after source.

    A window begins with the last token of the one before it, so that each token of a stream but its first is predicted
    exactly once. With `mask_documents` a window is one sample for each document in it: the sample of a document begins
    with the end token before it, which is also the last token that the sample before predicts. The samples of one
    window are one unit.

    Args:
        sources: streams, with the windows of each that are used.
        window: tokens of a window, at least 2; the last window of a stream may be shorter.
        mask_documents: whether a token sees nothing of the documents before its own.
    """

    def __init__(self, sources: Sequence[StreamWindows], window: int, *, mask_documents: bool) -> None:
        self.sources = tuple(sources)
        self.window, self.mask_documents = window, mask_documents
        self._ends = [*accumulate(source.num_windows for source in self.sources)]

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._ends[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows, each counted once."""
        return sum(source.num_tokens for source in self.sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of their text as UTF-8."""
        return sum(source.num_bytes for source in self.sources)

    @property
    def data_hash(self) -> str:
        """SHA-256 of the tokens and of their division into windows."""
        parts = [f"{source.content_hash}:{source.num_windows}" for source in self.sources]
        text = "|".join([f"{self.window}:{int(self.mask_documents)}", *parts])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Windows of each source."""
        return tuple(source.num_windows for source in self.sources)

    @overload
    def __getitem__(self, index: int) -> tuple[TrainingSample, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[TrainingSample, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[TrainingSample, ...] | list[tuple[TrainingSample, ...]]:
        """Make the samples of a window, or of several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        place = bisect_right(self._ends, number)
        source = self.sources[place]
        return self._samples(source, number - (self._ends[place - 1] if place else 0))

    def _samples(self, source: StreamWindows, number: int) -> tuple[TrainingSample, ...]:
        begin = number * (self.window - 1)
        end = min(begin + self.window, source.num_tokens)
        ids, name = source.stream.tokens(begin, end), f"{source.name}:{number}"
        # a document that begins with the last token has all its others in the next window
        starts = source.stream.document_starts(begin + 1, end - 1) if self.mask_documents else []
        if not starts:
            return (TrainingSample(name, tuple(ids), 0, 0.0),)
        bounds = [begin, *starts, end - 1]
        return tuple(
            TrainingSample(f"{name}#{part}", tuple(ids[first - begin : last - begin + 1]), 0, 0.0, unit=name)
            for part, (first, last) in enumerate(pairwise(bounds))
        )


def num_windows_of(num_tokens: int, window: int) -> int:
    """Return the number of windows that predict each of so many tokens but the first once."""
    return -(-(num_tokens - 1) // (window - 1))


def first_windows(sizes: Sequence[int], limit: int) -> list[int]:
    """Return how many windows of each source are used, in proportion to their sizes, at least one of each.

    A `limit` of 0 uses them all.
    """
    total = sum(sizes)
    if not limit or limit >= total:
        return [*sizes]
    # each takes its share of what the ones before it left, so that the sum is the limit
    chosen: list[int] = []
    left, size_left = limit, total
    for size in sizes:
        taken = min(size, max(1, round(left * size / size_left)))
        chosen.append(taken)
        left, size_left = max(left - taken, 0), size_left - size
    return chosen
