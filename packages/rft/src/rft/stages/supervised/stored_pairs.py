"""Pairs of responses in the store of a run: opened for `dpo` and `rm`, and the samples that each trains on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rft.hub.download import ASIDE
from rft.tokenizing.kinds import Kind, StoredRowsText
from rft.tokenizing.pairs import EQUAL_RESPONSES, PairText
from rft.tokenizing.row_store import StoredRows, first_rows_of_sources, open_store, stored_sources
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.preference_rows.preference_columns import PreferenceKeys
from rft_trainer.data.preference_rows.preferences import all_equal, notes_on_columns
from rft_trainer.data.store.pair_samples import MakeSample, PairSamples
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.settings.data import StoredRowsSettings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPairs:
    """The pairs of a run in a store."""

    stored: StoredRows
    unused: tuple[str, ...]
    """A sentence on each source that has columns which nothing reads."""

    @property
    def num_equal(self) -> int:
        """Pairs that are left out since both responses are the same text."""
        return self.stored.counts[EQUAL_RESPONSES]

    def samples(self, make: MakeSample) -> PairSamples:
        """Return both samples of every pair in turn, as `make` gives them to a stage."""
        return PairSamples(self.stored.samples, make)

    def lines(self) -> list[str]:
        """Return the lines of the plan."""
        too_long = len(self.stored.too_long)
        lines = self.stored.lines(2, "pairs")
        lines += [f"left out, too long: {too_long:,} pairs"] if too_long else []
        return lines + ([f"left out, both responses equal: {self.num_equal:,} pairs"] if self.num_equal else [])


def open_pairs(
    data: StoredRowsSettings,
    tokenizer: HfTokenizer,
    kind: Kind,
    keys: PreferenceKeys,
    all_too_long: Callable[[Sequence[tuple[str, int]]], Exception],
    **text: Any,
) -> StoredPairs:
    """Build what is missing of the store of pairs, and open it.

    Args:
        data: names the rows and the place of the store.
        tokenizer: makes their tokens.
        kind: of the rows.
        keys: columns that the settings name.
        all_too_long: makes the error of pairs none of which fits.
        text: further fields of `PairText`.

    Raises:
        DataError: a row cannot be used, or no pair is left.
    """
    specs, rows = stored_sources(data), first_rows_of_sources(data)
    unused: list[str] = []
    for spec, row in zip(specs, rows, strict=True):
        notes, own_unused = notes_on_columns(spec.name, [row], keys)
        for note in notes:
            _LOG.info("%s", note, extra=ASIDE)
        unused += own_unused
    found = [asdict(keys.found_in(list(row.fields))) for row in rows]
    # as JSON has it, so that the name of the store is one on every side of a pipe
    columns = [{**one, "outcomes": list(one["outcomes"])} for one in found]
    wanted = StoredRowsText(kind, PairText(sources=[spec.name for spec in specs], keys=columns, **text))

    def nothing_left(too_long: Sequence[tuple[str, int]], counts: Counter[str]) -> Exception:
        return all_too_long(too_long) if too_long else all_equal(specs, counts[EQUAL_RESPONSES])

    return StoredPairs(open_store(data, tokenizer, wanted, nothing_left), tuple(unused))


def preference_sample(*, has_margin: bool, ld_alpha: float) -> MakeSample:
    """Return what makes the samples of `dpo`; with `ld_alpha` the excess of the longer response weighs less."""

    def make(sample: TrainingSample, response: str, others: int) -> TrainingSample:
        length = sample.num_tokens - sample.prompt_length
        shorter = min(length, others)
        return replace(
            sample,
            sample_id=f"{sample.sample_id}/{response}",
            advantage=sample.weight,
            weight=1.0,
            token_weights=response_weights(length, shorter, ld_alpha),
            unit=sample.sample_id,
            sequence_numbers=sample.sequence_numbers if has_margin else (),
        )

    return make


def response_weights(length: int, shorter: int, ld_alpha: float) -> tuple[float, ...]:
    """Return the weights of a response's tokens (Liu et al. 2024, arXiv 2409.06411); empty where all are 1."""
    return (1.0,) * shorter + (ld_alpha,) * (length - shorter) if ld_alpha < 1 else ()


def reward_sample(margin: float | None) -> MakeSample:
    """Return what makes the samples of `rm`, all with this margin; None = the rows have margins of their own."""

    def make(sample: TrainingSample, response: str, others: int) -> TrainingSample:
        del others
        numbers = sample.sequence_numbers
        return replace(
            sample,
            sample_id=f"{sample.sample_id}/{response}",
            unit=sample.sample_id,
            sequence_numbers=numbers if margin is None else (margin, *numbers[1:]),
        )

    return make


def pairs_by_prompt(stored: StoredRows) -> list[Any]:
    """Return the numbers [n] int64 of the pairs of each prompt, prompts in the order of their first pairs."""
    keys = stored.samples.prompt_keys()[::2]
    _, firsts, prompt_of_pair = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(prompt_of_pair, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(prompt_of_pair))[:-1])
    return [groups[number] for number in np.argsort(firsts)]
