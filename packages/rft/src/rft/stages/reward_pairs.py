"""Pairs of responses as training units of a reward model, from data settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.stages.supervised.pair_texts import PairTextEncoder
from rft.stages.supervised.stored_pairs import StoredPairs, open_pairs, pairs_by_prompt, reward_sample
from rft.tokenizing.pairs import CHOSEN_LONGER, TIES, prompt_key, refuse_messages
from rft.tokenizing.row_store import wants_store
from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, permutation
from rft_models.reward_model.text import shared_length
from rft_trainer.batches.units import Unit
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.preference_rows.preference_columns import PreferenceKeys
from rft_trainer.data.preference_rows.preferences import LoadedPairs, PreferencePair, load_pairs, pairs_hash
from rft_trainer.data.prefetch import Prefetcher
from rft_trainer.data.prompts import PromptRow
from rft_trainer.data.sources import SourceSpec
from rft_trainer.data.store.pair_samples import PairUnits
from rft_trainer.records.pairs import EQUAL, FIRST_IS_BETTER, PairLabel
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.settings.reward_model import PairColumnSettings, PairDataSettings, RewardTrainingSettings

_LOG = logging.getLogger(__name__)
_CHUNK = 256
_ENOUGH = 20
"""Pairs from which on a share says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardData:
    """Training and held-out pairs of a reward model's run."""

    loaded: LoadedPairs | None
    """The pairs as they were read; None where they are in a store."""
    units: Sequence[Unit]
    left_out: tuple[tuple[str, int], ...]
    """(pair id, tokens of the longer text) of pairs that are too long."""
    limit: int
    held_out: tuple[TrainingSample, ...]
    """Both texts of every held-out pair, one pair after another."""
    mixture: Mixture
    data_hash: str
    num_steps: int
    num_ties: int
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""
    stored: StoredPairs | None = None
    """The store of the pairs, where they are in one."""

    @property
    def label_lines(self) -> list[str]:
        """Return what the plan says of the labels."""
        return [f"{self.num_ties:,} of them were judged equal"] if self.num_ties else []


def reward_data(
    data: PairDataSettings,
    training: RewardTrainingSettings,
    heads: Sequence[str],
    encoder: PairTextEncoder,
    *,
    max_positions: int,
    seed: int,
) -> RewardData:
    """Read, encode and count; needs a tokenizer and no weights.

    Raises:
        OptionsError: no rows are named, or more are held out than there are.
        DataError: as `load_pairs`; a tie without `tie_margin`; no pair fits; a held-out pair does not fit.
    """
    keys = replace(pair_keys(data, heads), margin=data.margin_key, weight=data.weight_key)
    limit = min(training.max_len or max_positions, max_positions)
    column = encoder.column
    reason = "the model reads images" if encoder.takes_images else ""
    if wants_store(data, encoder.tokenizer, images_key=column.key if column else "", reason=reason, in_pairs=True):
        return _Stored(data, training, keys, encoder, limit, max_positions).read(seed)
    loaded = _read(data, keys, encoder)
    pairs = first_of(loaded.pairs, loaded.specs, data.max_samples) if data.max_samples else list(loaded.pairs)
    _refuse_ties(pairs, training)
    units = _encoded(pairs, encoder, training.margin, keys, data)
    encoded = {unit[0].unit: unit for unit in units}
    lengths = {name: max(sample.num_tokens for sample in unit) for name, unit in encoded.items()}
    kept = [pair for pair in pairs if lengths[pair.pair_id] <= limit]
    left_out = tuple((name, length) for name, length in lengths.items() if length > limit)
    if not kept:
        raise _all_too_long(left_out, limit, max_positions)
    apart: Sequence[PreferencePair] = ()
    if data.eval_data:
        apart = _held_out(data, training, keys, encoder)
        held_out = [pair_unit(pair, encoder, training.margin, keys) for pair in apart]
        _refuse_too_long(held_out, limit, max_positions)
    else:
        kept, apart = apart_from(kept, data.held_out_rows, seed) if data.held_out_rows else (kept, ())
        held_out = [encoded[pair.pair_id] for pair in apart]
    return RewardData(
        loaded=loaded,
        units=tuple(encoded[pair.pair_id] for pair in kept),
        left_out=left_out,
        limit=limit,
        held_out=tuple(sample for unit in held_out for sample in unit),
        mixture=mixture_of(loaded.specs, kept),
        data_hash=pairs_hash(kept),
        num_steps=_num_steps(training, len(kept)),
        num_ties=sum(_has_tie(pair) for pair in kept),
        notes=_notes(loaded, kept, apart),
    )


class HasPrompt(Protocol):
    """A row of data with its prompt."""

    @property
    def prompt(self) -> PromptRow: ...


RowT = TypeVar("RowT", bound=HasPrompt)


def first_of(rows: Sequence[RowT], specs: Sequence[SourceSpec], limit: int) -> list[RowT]:
    """Return `limit` rows, from each source in proportion to its size; global order is kept."""
    sizes = {spec.name: sum(row.prompt.source == spec.name for row in rows) for spec in specs}
    seen = dict.fromkeys(sizes, 0)
    places: list[float] = []
    for row in rows:
        source = row.prompt.source
        places.append((seen[source] + 0.5) / sizes[source])
        seen[source] += 1
    chosen = sorted(range(len(places)), key=lambda index: (places[index], index))[:limit]
    return [rows[index] for index in sorted(chosen)]


def apart_from(rows: Sequence[RowT], count: int, seed: int) -> tuple[list[RowT], list[RowT]]:
    """(those to train on, at least `count` others chosen by the seed); rows of one prompt stay on one side."""
    by_prompt: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        by_prompt.setdefault(_prompt(row), []).append(number)
    apart = _numbers_apart([*by_prompt.values()], len(rows), count, seed)
    return [row for n, row in enumerate(rows) if n not in apart], [row for n, row in enumerate(rows) if n in apart]


def mixture_of(specs: Sequence[SourceSpec], kept: Sequence[HasPrompt]) -> Mixture:
    """Return the mixture by which an epoch visits the rows, in their order (source after source)."""
    sizes = [sum(row.prompt.source == spec.name for row in kept) for spec in specs]
    known = [spec.probability for spec in specs if spec.probability is not None]
    return Mixture(sizes, known if len(known) == len(specs) else None)


def _num_steps(training: RewardTrainingSettings, num_pairs: int) -> int:
    num_steps = -(-num_pairs // training.train_batch_size) * training.max_epochs
    return min(num_steps, training.max_steps) if training.max_steps else num_steps


def pair_keys(data: PairColumnSettings, heads: Sequence[str]) -> PreferenceKeys:
    """Return the columns of a pair: with several heads each has a column of its name that says which is better."""
    outcomes = tuple(heads) if len(heads) > 1 else tuple(filter(None, [data.outcome_key]))
    return PreferenceKeys(
        prompt=data.input_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        outcomes=outcomes,
    )


def pair_unit(pair: PreferencePair, encoder: PairTextEncoder, margin: float, keys: PreferenceKeys) -> Unit:
    """Encode both responses as a reward model reads them; what the texts begin with alike counts as the prompt."""
    prompt = pair.prompt
    refuse_messages(encoder.tokenizer, prompt)
    rows, media = zip(*(encoder.encode_row(prompt, text) for text in (pair.chosen, pair.rejected)), strict=True)
    label = PairLabel(
        pair.outcomes or (FIRST_IS_BETTER,), pair.margin if keys.margin else margin, pair.weight
    ).as_numbers()
    begin = shared_length(rows)
    return tuple(
        TrainingSample(
            f"{pair.pair_id}/{part}", tuple(row), begin, 0.0, media=seen, unit=pair.pair_id, sequence_numbers=label
        )
        for part, row, seen in zip(("chosen", "rejected"), rows, media, strict=True)
    )


def _encoded(
    pairs: Sequence[PreferencePair],
    encoder: PairTextEncoder,
    margin: float,
    keys: PreferenceKeys,
    data: PairDataSettings,
) -> list[Unit]:
    """Encode the pairs in their order, `num_workers` threads ahead."""
    chunks = [pairs[start : start + _CHUNK] for start in range(0, len(pairs), _CHUNK)]
    with Prefetcher(
        chunks,
        lambda chunk: [pair_unit(pair, encoder, margin, keys) for pair in chunk],
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
    ) as encoded:
        return [unit for chunk in encoded for unit in chunk]


def _read(data: PairDataSettings, keys: PreferenceKeys, encoder: PairTextEncoder) -> LoadedPairs:
    if not data.prompt_data:
        raise OptionsError(
            code="data.no_pairs",
            what="prompt_data is empty",
            where="--prompt_data",
            why="training needs rows: a .jsonl, .json, .csv or .parquet file, or a directory of a data set",
            do="--prompt_data pairs.jsonl",
        )
    specs = located_sources(
        data.prompt_data, data.prompt_data_probs or None, split=data.prompt_split, flag="--prompt_data"
    )
    chat = encoder.tokenizer.has_chat_template
    loaded = load_pairs(specs, keys, split=data.prompt_split or None, chat=chat, images=encoder.column)
    _tell(loaded)
    return encoder.arranged(loaded)


def _held_out(
    data: PairDataSettings, training: RewardTrainingSettings, keys: PreferenceKeys, encoder: PairTextEncoder
) -> Sequence[PreferencePair]:
    specs = located_sources(data.eval_data, split=data.eval_split, flag="--eval_data")
    chat = encoder.tokenizer.has_chat_template
    loaded = load_pairs(specs, keys, split=data.eval_split or None, chat=chat, images=encoder.column)
    _tell(loaded)
    loaded = encoder.arranged(loaded)
    pairs = loaded.pairs[: data.max_eval_samples] if data.max_eval_samples else loaded.pairs
    _refuse_ties(pairs, training)
    return pairs


def _refuse_too_long(units: Sequence[Unit], limit: int, max_positions: int) -> None:
    too_long = [unit for unit in units if max(sample.num_tokens for sample in unit) > limit]
    if too_long:
        longest = max(sample.num_tokens for unit in too_long for sample in unit)
        raise DataError(
            code="eval.pair_too_long",
            what=f"{len(too_long)} of {len(units)} held-out pairs have texts of more than {limit} tokens; the first is "
            f"{too_long[0][0].unit}, and the longest text has {longest}",
            where="--eval_data",
            why="an evaluation that leaves rows out would not be the evaluation that was asked for",
            do=room_for(longest, max_positions, f"remove the pairs of more than {limit} tokens"),
        )


def _tell(loaded: LoadedPairs) -> None:
    """Log which columns were taken, where the settings do not name them."""
    for note in loaded.notes:
        _LOG.info("%s", note, extra=ASIDE)


def _numbers_apart(prompts: Sequence[Iterable[int]], num_rows: int, count: int, seed: int) -> set[int]:
    """Numbers of at least `count` rows, chosen by the seed among `prompts`, each of which has these rows."""
    apart: set[int] = set()
    for index in map(int, permutation(derive_key(seed, "held_out"), len(prompts))):
        if len(apart) >= count:
            break
        apart.update(map(int, prompts[index]))
    if len(apart) >= num_rows:
        raise OptionsError(
            code="data.held_out_pairs",
            what=f"held_out_rows = {count}, and there are {num_rows} training rows of {len(prompts)} prompts",
            where="--held_out_rows",
            why="rows of one prompt stay together, and at least one prompt must be left to train on",
            do=f"--held_out_rows {max(1, num_rows // 20)}" if len(prompts) > 1 else "--held_out_rows 0",
        )
    return apart


def _has_tie(pair: PreferencePair) -> bool:
    return EQUAL in pair.outcomes


def _refuse_ties(pairs: Sequence[PreferencePair], training: RewardTrainingSettings) -> None:
    tied = [pair.pair_id for pair in pairs if _has_tie(pair)]
    if tied and not training.tie_margin:
        raise _tied(len(tied), len(pairs), tied[0])


def _tied(num_ties: int, num_pairs: int, first: str) -> DataError:
    return DataError(
        code="data.tie",
        what=f"{num_ties} of {num_pairs} pairs are ties, the first is {first}",
        where="--tie_margin",
        why="Bradley-Terry has no probability of a tie; Rao-Kupper's model has, with a difference that is hardly "
        "noticed",
        do="--tie_margin 0.5",
    )


def room_for(longest: int, max_positions: int, otherwise: str) -> str:
    """Return the remedy for a text that is too long: a higher limit where the model places it."""
    return f"--max_len {longest}" if longest <= max_positions else otherwise


def _all_too_long(left_out: Sequence[tuple[str, int]], limit: int, max_positions: int) -> DataError:
    longest = max((length for _, length in left_out), default=limit)
    return DataError(
        code="data.pairs_too_long",
        what=f"0 of {len(left_out)} pairs have texts of at most {limit} tokens (the longest has {longest})",
        where="--max_len",
        why="a pair is used whole or left out, and here all would be left out",
        do=room_for(longest, max_positions, f"shorten the texts to {limit} tokens, or take a model that places more"),
    )


def _prompt(row: HasPrompt) -> tuple[object, ...]:
    # the same question about another image is another prompt
    return row.prompt.text, row.prompt.messages, *(image.digest for image in row.prompt.images)


def _notes(loaded: LoadedPairs, kept: Sequence[PreferencePair], held_out: Sequence[PreferencePair]) -> tuple[str, ...]:
    known = set(map(_prompt, kept))
    shared = sum(_prompt(pair) in known for pair in held_out)
    longer = sum(len(pair.chosen) > len(pair.rejected) for pair in kept)
    return (*_counted_notes(len(loaded.equal), shared, len(held_out), longer, len(kept)), *loaded.unused)


def _counted_notes(num_equal: int, num_shared: int, num_held_out: int, num_longer: int, num_kept: int) -> list[str]:
    notes: list[str] = []
    if num_equal:
        notes.append(f"left out, both responses are the same text: {num_equal:,} pairs")
    if num_shared:
        notes.append(f"{num_shared:,} of {num_held_out:,} held-out pairs have a prompt that is trained on too")
    longer = num_longer / num_kept
    if num_kept >= _ENOUGH and not 0.3 <= longer <= 0.7:
        notes.append(f"the chosen response is the longer one in {longer:.0%} of the pairs: length alone tells much")
    return notes


@dataclass(frozen=True, slots=True)
class _Stored:
    """The pairs of a run in a store."""

    data: PairDataSettings
    training: RewardTrainingSettings
    keys: PreferenceKeys
    encoder: PairTextEncoder
    limit: int
    max_positions: int

    def read(self, seed: int) -> RewardData:
        """Build or open the store; held-out pairs are read into memory."""
        data, training = self.data, self.training
        pairs = open_pairs(
            data,
            self.encoder.tokenizer,
            "reward_pairs",
            self.keys,
            lambda too_long: _all_too_long(too_long, self.limit, self.max_positions),
            max_len=self.limit,
            chat=self.encoder.tokenizer.has_chat_template,
        )
        stored, samples = pairs.stored, pairs.samples(reward_sample(None if self.keys.margin else training.margin))
        units = PairUnits(samples)
        num_ties = stored.counts[TIES]
        if num_ties and not training.tie_margin:
            first = next(unit[0].unit for unit in units if _is_tied(unit))
            raise _tied(num_ties, len(units), first)
        apart: list[int] = []
        shared = 0
        if data.eval_data:
            read = _held_out(data, training, self.keys, self.encoder)
            held_out = [pair_unit(pair, self.encoder, training.margin, self.keys) for pair in read]
            _refuse_too_long(held_out, self.limit, self.max_positions)
            known = np.array([prompt_key(pair.prompt) for pair in read], np.uint64)
            shared = int(np.isin(known, stored.samples.prompt_keys()).sum())
        else:
            if data.held_out_rows:
                apart = sorted(_numbers_apart(pairs_by_prompt(stored), len(units), data.held_out_rows, seed))
            held_out = [units[number] for number in apart]
            gone = {*apart}
            units = PairUnits(samples.picked(n for n in range(len(units)) if n not in gone)) if apart else units
        num_held_out = len(held_out) if data.eval_data else 0
        longer = stored.counts[CHOSEN_LONGER]
        notes = _counted_notes(0, shared, num_held_out, longer, len(units) + len(apart))
        return RewardData(
            loaded=None,
            units=units,
            left_out=stored.too_long,
            limit=self.limit,
            held_out=tuple(sample for unit in held_out for sample in unit),
            mixture=stored.mixture((unit[0].unit for unit in held_out) if apart else (), 2),
            data_hash=stored.data_hash,
            num_steps=_num_steps(training, len(units)),
            num_ties=num_ties - sum(map(_is_tied, held_out)) if apart else num_ties,
            notes=(*notes, *pairs.unused),
            stored=pairs,
        )


def _is_tied(unit: Unit) -> bool:
    """Return whether the label of a pair has a tie; margin and weight stand before the outcomes."""
    return EQUAL in unit[0].sequence_numbers[2:]
