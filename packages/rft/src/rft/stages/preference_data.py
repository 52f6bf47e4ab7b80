"""Preference rows as samples, from data settings: pairs, labelled responses, and those of other prompts for KTO."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rft.build.images import ImageReading, row_images
from rft.build.prompt_data import data_notes, first_rows, held_out_settings, render_rows, renderer_for
from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.settings import DpoSettings
from rft.stages.supervised.stored_pairs import StoredPairs, open_pairs, preference_sample, response_weights
from rft.tokenizing.row_store import wants_store
from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, permutation
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.preference_rows.preference_columns import LabelledKeys, PreferenceKeys
from rft_trainer.data.preference_rows.preferences import (
    LabelledResponse,
    LoadedLabels,
    LoadedPairs,
    PreferencePair,
    labelled,
    load_labels,
    load_pairs,
)
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.data.sources import SourceSpec, rows_of_source
from rft_trainer.data.store.pair_samples import PairSamples
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.settings.preference_training import PreferenceDataSettings

_LOG = logging.getLogger(__name__)
Row = TypeVar("Row", PreferencePair, LabelledResponse)


@dataclass(frozen=True, slots=True)
class ReadPreferences:
    """Rows of one place as samples, and what was left out of them."""

    loaded: LoadedPairs | LoadedLabels | None
    """The rows as they were read; None where they are in a store."""
    samples: Sequence[TrainingSample]
    """Of a pair chosen and rejected in turn; one a labelled response."""
    mismatched: list[TrainingSample]
    """A sample a labelled response: its prompt with the response to another one; none for pairs."""
    rendered: list[RenderedPrompt]
    """Prompts of the rows, one a row of the data."""
    left_out: list[tuple[str, int]]
    """(row id, tokens) of rows that are too long."""
    samples_a_row: int
    """2 for pairs, 1 for labelled responses."""
    stored: StoredPairs | None = None
    """The store of the rows, where they are in one."""
    pairs: PairSamples | None = None
    """The samples, where they are in that store."""
    num_tokens_apart: int = 0
    """Learned tokens of the rows of that store that are held out."""

    @property
    def num_loss_tokens(self) -> int:
        """Learned tokens of all samples."""
        if self.stored is not None:
            return self.stored.stored.num_loss_tokens - self.num_tokens_apart
        return sum(sample.num_loss_tokens for sample in self.samples)

    @property
    def num_rows(self) -> int:
        """Number of pairs, or of labelled responses."""
        return len(self.samples) // self.samples_a_row

    @property
    def noun(self) -> str:
        """Name of the rows for people."""
        return "pairs" if self.samples_a_row == 2 else "labelled responses"


@dataclass(frozen=True, slots=True)
class PreferenceData:
    """Training and held-out rows of preference training."""

    training: ReadPreferences
    held_out: ReadPreferences | None
    num_steps: int
    mixture: Mixture
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""

    @property
    def data_hash(self) -> str:
        """Hash of the training rows."""
        if self.training.loaded is not None:
            return self.training.loaded.content_hash
        assert self.training.stored is not None
        return self.training.stored.stored.data_hash


def preference_data(settings: DpoSettings, tokenizer: HfTokenizer, max_positions: int) -> PreferenceData:
    """Read, render and count; needs a tokenizer and no weights."""
    data, chosen = settings.data, settings.training
    reader = _Reader(
        settings, tokenizer, chosen.max_len or max_positions, row_images(settings.images, settings.run.seed)
    )
    if not data.prompt_data:
        raise OptionsError(
            code="data.no_preferences",
            what="prompt_data is empty",
            where="--prompt_data",
            why="training needs pairs: a .jsonl, .json, .csv or .parquet file, or a directory of a data set",
            do="--prompt_data pairs.jsonl",
        )
    reason = "loss_type kto gives every prompt the response to another one" if settings.loss.loss_type == "kto" else ""
    if wants_store(data, tokenizer, images_key=settings.images.images_key, reason=reason, in_pairs=True):
        training = _stored(settings, tokenizer, reader.max_len)
        unused = training.stored.unused if training.stored else ()
    else:
        training = reader.read(data.prompt_data, data.prompt_split, data.max_samples, data, "--prompt_data")
        unused = training.loaded.unused if training.loaded else ()
    held_out: ReadPreferences | None = None
    apart: list[str] = []
    if data.eval_data:
        columns = replace(data, input_key=data.eval_input_key) if data.eval_input_key else data
        with held_out_settings():
            held_out = reader.read(data.eval_data, data.eval_split, data.max_eval_samples, columns, "--eval_data")
    elif data.held_out_rows:
        training, held_out = _hold_out(training, data.held_out_rows, settings.run.seed)
        if training.stored is not None:
            apart = [sample.unit for sample in held_out.samples[::2]]
            training = replace(training, num_tokens_apart=held_out.num_loss_tokens)
    num_steps = -(-training.num_rows // chosen.train_batch_size) * chosen.max_epochs
    num_steps = min(num_steps, chosen.max_steps) if chosen.max_steps else num_steps
    rendered = () if held_out is None or not data.eval_data else held_out.rendered
    notes = data_notes(data, tokenizer, training.rendered, rendered, unused=unused)
    return PreferenceData(training, held_out, num_steps, reader.mixture(training, apart), notes)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of preference rows with the settings of a run."""

    settings: DpoSettings
    tokenizer: HfTokenizer
    max_len: int
    images: ImageReading

    def read(self, path: str, split: str, limit: int, columns: PreferenceDataSettings, flag: str) -> ReadPreferences:
        """Read the rows of a place; those that are too long are left out by name."""
        loaded, rows, labels = self._loaded(path, split, columns, flag)
        for note in loaded.notes:
            _LOG.info("%s", note, extra=ASIDE)
        # a prompt of two labelled responses is rendered once
        prompts = list({prompt.prompt_id: prompt for prompt in loaded.prompts}.values())
        asked = first_rows(prompts, limit) if limit else prompts
        data = self.settings.data
        rendered, left_out = render_rows(
            self.images.arranged(asked),
            renderer_for(columns, self.tokenizer),
            self.max_len,
            data.num_workers,
            data.prefetch_factor,
            "--max_len",
        )
        by_id = {prompt.prompt_id: prompt for prompt in rendered}
        if labels is not None:
            fitting = self._fitting([(row, self._labelled(row, by_id)) for row in labels if _has(row, by_id)], left_out)
            samples = [sample for _, [sample] in fitting]
            mismatched = self._mismatched([row for row, _ in fitting], by_id)
            return ReadPreferences(loaded, samples, mismatched, rendered, left_out, 1)
        pairs = [(row, self._of_pair(row, by_id)) for row in rows if _has(row, by_id)]
        samples = [sample for _, found in self._fitting(pairs, left_out) for sample in found]
        return ReadPreferences(loaded, samples, [], rendered, left_out, 2)

    def _loaded(
        self, path: str, split: str, columns: PreferenceDataSettings, flag: str
    ) -> tuple[LoadedPairs | LoadedLabels, Sequence[PreferencePair], Sequence[LabelledResponse] | None]:
        """Return the rows of a place, as pairs, and with `loss_type` kto as labelled responses."""
        data, is_labelled = self.settings.data, self.settings.loss.loss_type == "kto"
        # shares are of the training rows
        shares = data.prompt_data_probs if flag == "--prompt_data" else ""
        specs = located_sources(path, shares or None, split=split, flag=flag)
        keys = _keys(columns)
        names = LabelledKeys(
            prompt=columns.input_key,
            completion=columns.completion_key,
            label=columns.label_key,
            weight=columns.weight_key,
        )
        chat, images = columns.apply_chat_template, self.images.column
        if is_labelled and not self._has_pairs(specs[0], split, keys):
            labels = load_labels(specs, names, split=split or None, chat=chat, images=images)
            return labels, (), labels.responses
        pairs = load_pairs(specs, keys, split=split or None, chat=chat, images=images)
        return pairs, pairs.pairs, labelled(pairs.pairs) if is_labelled else None

    @staticmethod
    def _has_pairs(spec: SourceSpec, split: str, keys: PreferenceKeys) -> bool:
        """Return whether the rows of a source have the columns of pairs."""
        rows = rows_of_source(spec, split=split or None)
        present = list(rows[0].fields) if rows else []
        found = keys.found_in(present)
        return {found.chosen, found.rejected} <= {*present}

    def _fitting(
        self, rows: Sequence[tuple[Row, list[TrainingSample]]], left_out: list[tuple[str, int]]
    ) -> list[tuple[Row, list[TrainingSample]]]:
        """Return the rows whose samples fit; the others are added to `left_out`."""
        fitting: list[tuple[Row, list[TrainingSample]]] = []
        for row, samples in rows:
            longest = max(sample.num_tokens for sample in samples)
            if longest > self.max_len:
                left_out.append((samples[0].sample_id.rpartition("/")[0], longest))
            else:
                fitting.append((row, samples))
        if not fitting:
            raise _all_too_long(left_out, self.max_len)
        return fitting

    def _of_pair(self, pair: PreferencePair, prompts: Mapping[str, RenderedPrompt]) -> list[TrainingSample]:
        """Return chosen and rejected response as one unit; with `ld_alpha` their excess weighs less."""
        prompt = prompts[pair.pair_id]
        chosen, rejected = self._response(pair.chosen), self._response(pair.rejected)
        shorter = min(len(chosen), len(rejected))
        return [
            TrainingSample(
                f"{pair.pair_id}/{name}",
                (*prompt.token_ids, *response),
                len(prompt.token_ids),
                pair.weight,
                token_weights=response_weights(len(response), shorter, self.settings.loss.ld_alpha),
                media=prompt.media,
                unit=pair.pair_id,
                sequence_numbers=(pair.margin,) if self.settings.data.margin_key else (),
            )
            for name, response in (("chosen", chosen), ("rejected", rejected))
        ]

    def _labelled(
        self, row: LabelledResponse, prompts: Mapping[str, RenderedPrompt], response: str | None = None
    ) -> list[TrainingSample]:
        """Return a labelled response as a sample; `response` is that of another prompt."""
        prompt = prompts[row.prompt.prompt_id]
        name = "good" if row.desirable else "bad"
        tokens = self._response(row.response if response is None else response)
        sample = TrainingSample(
            f"{prompt.prompt_id}/{name if response is None else 'mismatched'}",
            (*prompt.token_ids, *tokens),
            len(prompt.token_ids),
            row.weight if row.desirable else -row.weight,
            media=prompt.media,
        )
        return [sample]

    def _mismatched(
        self, rows: Sequence[LabelledResponse], prompts: Mapping[str, RenderedPrompt]
    ) -> list[TrainingSample]:
        """Return every prompt with the response to another one, drawn by the seed; what is too long is cut."""
        key = derive_key(self.settings.run.seed, "mismatched responses")
        order = [int(index) for index in permutation(key, len(rows))]
        found: list[TrainingSample] = []
        for place, index in enumerate(order):
            row = rows[index]
            # the next in a drawn order with another prompt; where there is one prompt alone, its other response
            others = (rows[order[(place + step) % len(order)]] for step in range(1, len(order)))
            other = next((one for one in others if one.prompt.prompt_id != row.prompt.prompt_id), row)
            [sample] = self._labelled(row, prompts, other.response)
            room = max(self.max_len, sample.prompt_length + 1)
            found.append(replace(sample, token_ids=sample.token_ids[:room]))
        by_row = dict(zip(order, found, strict=True))
        return [by_row[index] for index in range(len(rows))]

    def _response(self, text: str) -> tuple[int, ...]:
        # sampling stops at any of the end tokens; one of them is enough to learn
        return (*self.tokenizer.encode(text), *self.tokenizer.eos_ids[:1])

    def mixture(self, training: ReadPreferences, apart: Iterable[str]) -> Mixture:
        """Return the mixture by which an epoch visits the rows, in their order (source after source)."""
        if training.stored is not None:
            return training.stored.stored.mixture(apart, training.samples_a_row)
        assert training.loaded is not None
        names = [sample.sample_id.rpartition("/")[0] for sample in training.samples[:: training.samples_a_row]]
        sources = [name.rpartition(":")[0] for name in names]
        specs = training.loaded.specs
        known = [spec.probability for spec in specs if spec.probability is not None]
        return Mixture([sources.count(spec.name) for spec in specs], known if len(known) == len(specs) else None)


def _stored(settings: DpoSettings, tokenizer: HfTokenizer, max_len: int) -> ReadPreferences:
    """Build or open the store of the training pairs."""
    data = settings.data
    opened = open_pairs(
        data,
        tokenizer,
        "preferences",
        _keys(data),
        lambda too_long: _all_too_long(too_long, max_len),
        max_len=max_len,
        chat=data.apply_chat_template,
        input_template=data.input_template,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
    )
    make = preference_sample(has_margin=bool(data.margin_key), ld_alpha=settings.loss.ld_alpha)
    samples = opened.samples(make)
    return ReadPreferences(None, samples, [], [], [*opened.stored.too_long], 2, opened, samples)


def _keys(columns: PreferenceDataSettings) -> PreferenceKeys:
    return PreferenceKeys(
        prompt=columns.input_key,
        chosen=columns.chosen_key,
        rejected=columns.rejected_key,
        margin=columns.margin_key,
        weight=columns.weight_key,
    )


def _has(row: PreferencePair | LabelledResponse, prompts: Mapping[str, RenderedPrompt]) -> bool:
    return row.prompt.prompt_id in prompts


def _hold_out(read: ReadPreferences, count: int, seed: int) -> tuple[ReadPreferences, ReadPreferences]:
    """(rows to train on, `count` others chosen by the seed), both in their order."""
    total, size = read.num_rows, read.samples_a_row
    if count >= total:
        raise OptionsError(
            code="data.held_out_preferences",
            what=f"held_out_rows = {count}, and there are {total} training rows",
            where="--held_out_rows",
            why="at least one row must be left to train on",
            do=f"--held_out_rows {max(1, total // 20)}" if total > 1 else "--held_out_rows 0",
        )
    drawn = {int(index) for index in permutation(derive_key(seed, "held_out"), total)[:count]}

    def part(wanted: bool) -> ReadPreferences:
        rows = (row for row in range(total) if (row in drawn) == wanted)
        if read.pairs is not None:
            picked = read.pairs.picked(rows)
            return (
                replace(read, samples=list(picked), stored=None, pairs=None)
                if wanted
                else replace(read, samples=picked, pairs=picked)
            )
        rows = list(rows)
        samples = [read.samples[row * size + offset] for row in rows for offset in range(size)]
        return replace(read, samples=samples, mismatched=[read.mismatched[row] for row in rows if read.mismatched])

    return part(False), part(True)


def _all_too_long(left_out: Sequence[tuple[str, int]], max_len: int) -> DataError:
    longest = max((length for _, length in left_out), default=0)
    return DataError(
        code="data.all_pairs_too_long",
        what=f"0 of {len(left_out)} rows have at most {max_len} tokens in both responses (the longest has {longest})",
        where="--max_len",
        why="a row is used whole or left out, and here all would be left out",
        do=f"--max_len {longest}",
    )
