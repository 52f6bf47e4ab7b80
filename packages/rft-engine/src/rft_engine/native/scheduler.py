"""Prefill scheduling: a queue of prompts in order of length, cut by the rows that are free.

All samples of a prompt enter at once, so that the prompt is read once. Prompts of similar length
are neighbours in the queue, so that little of a prefill is padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_PREFILL_TOKENS = 16384
_MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class PromptCopies:
    """Samples `first_sample` to `first_sample + num_copies` (numbered over the whole call) of one prompt."""

    prompt_index: int
    length: int
    first_sample: int
    num_copies: int


class PrefillScheduler:
    """Queue of the prompts that still wait for their prefill, longest first.

    The longest prompts go first because their rows attend to the most: they are better decoded
    while the batch is full than alone at the end.
    """

    def __init__(self, lengths: Sequence[int], copies: Sequence[int], max_rows: int) -> None:
        """`lengths[p]` tokens and `copies[p]` samples of prompt p; more than `max_rows` of them are cut into pieces."""
        pieces: list[PromptCopies] = []
        first_sample = 0
        for index, (length, num_copies) in enumerate(zip(lengths, copies, strict=True)):
            for start in range(0, num_copies, max_rows):
                size = min(max_rows, num_copies - start)
                pieces.append(PromptCopies(index, length, first_sample + start, size))
            first_sample += num_copies
        self._waiting = deque(sorted(pieces, key=lambda piece: -piece.length))
        self.num_prefill_tokens = sum(piece.length for piece in pieces)

    @property
    def next_num_rows(self) -> int:
        """Rows that the next prompt needs; 0 when nothing waits."""
        return self._waiting[0].num_copies if self._waiting else 0

    def take(self, free_rows: int) -> list[PromptCopies]:
        """The next prompts for one prefill: they fit into the free rows and are of similar length; may be empty."""
        taken: list[PromptCopies] = []
        while self._waiting and self._waiting[0].num_copies <= free_rows:
            piece, longest = self._waiting[0], taken[0].length if taken else self._waiting[0].length
            is_similar = piece.length >= _MIN_LENGTH_RATIO * longest
            # the first one is taken whatever its length, or it would wait for ever; padding counts as tokens
            if taken and not (is_similar and (len(taken) + 1) * longest <= _MAX_PREFILL_TOKENS):
                break
            taken.append(self._waiting.popleft())
            free_rows -= piece.num_copies
        return taken
