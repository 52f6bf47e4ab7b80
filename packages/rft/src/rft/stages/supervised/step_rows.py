"""Rows of labelled steps as training units of a step reward model, from data settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.stages.reward_pairs import apart_from, first_of, mixture_of, room_for
from rft.tokenizing.row_store import wants_store
from rft_core.errors import DataError, OptionsError
from rft_models.reward_model.step_encoding import StepTextEncoder
from rft_trainer.batches.units import Unit
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.preference_rows.labelled_steps import LabelledSteps, LoadedSteps, load_steps, steps_hash
from rft_trainer.data.preference_rows.preference_columns import StepKeys
from rft_trainer.data.prefetch import Prefetcher
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings

_LOG = logging.getLogger(__name__)
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Training and held-out rows of a step reward model's run."""

    loaded: LoadedSteps
    units: tuple[Unit, ...]
    """A sample a row."""
    left_out: tuple[tuple[str, int], ...]
    """(row id, tokens) of rows that are too long."""
    limit: int
    held_out: tuple[TrainingSample, ...]
    mixture: Mixture
    data_hash: str
    num_steps: int
    """Optimizer steps."""
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""
    stored: None = None
    """No store holds rows of labelled steps."""

    @property
    def num_labels(self) -> int:
        """Number of labelled steps to train on."""
        return sum(sample.num_loss_tokens for unit in self.units for sample in unit)

    @property
    def label_lines(self) -> list[str]:
        """Return what the plan says of the labels."""
        return [f"{self.num_labels:,} labelled steps in them, {self.good_share:.1%} good"]

    @property
    def good_share(self) -> float:
        """Mean label of the steps to train on."""
        samples = [sample for unit in self.units for sample in unit]
        pairs = [zip(sample.returns, sample.loss_mask, strict=True) for sample in samples]
        return sum(label for labels in pairs for label, learned in labels if learned) / self.num_labels


def refuse_images_of_steps(images_key: str | None) -> None:
    """Steps are scored as text: images beside them would change nothing.

    Raises:
        OptionsError: if a column of images is named.
    """
    if images_key:
        raise OptionsError(
            code="rm.steps_images",
            what=f"images_key = {images_key} of a step reward model",
            where="--images_key",
            why="labelled steps are scored as text; no image of a row would be seen",
            do="leave --images_key out",
        )


def step_data(
    data: PairDataSettings,
    training: RewardTrainingSettings,
    encoder: StepTextEncoder,
    *,
    max_positions: int,
    seed: int,
) -> StepData:
    """Read, encode and count; needs a tokenizer and no weights.

    Raises:
        OptionsError: no rows are named, or more are held out than there are.
        DataError: as `load_steps`; no row fits; a held-out row does not fit.
    """
    if not data.prompt_data:
        raise OptionsError(
            code="data.no_steps",
            what="prompt_data is empty",
            where="--prompt_data",
            why="training needs rows: a .jsonl, .json or .parquet file, or a directory of a data set",
            do="--prompt_data steps.jsonl",
        )
    wants_store(data, encoder.tokenizer, reason="rows of labelled steps are not kept in one")
    limit = min(training.max_len or max_positions, max_positions)
    loaded = _read(data, data.prompt_data, data.prompt_split, encoder.separator)
    rows = first_of(loaded.rows, loaded.specs, data.max_samples) if data.max_samples else list(loaded.rows)
    samples = {row.prompt.prompt_id: sample for row, sample in zip(rows, _encoded(rows, encoder, data), strict=True)}
    kept = [row for row in rows if samples[row.prompt.prompt_id].num_tokens <= limit]
    left_out = tuple((name, one.num_tokens) for name, one in samples.items() if one.num_tokens > limit)
    if not kept:
        raise _all_too_long(left_out, limit, max_positions)
    apart: Sequence[LabelledSteps] = ()
    if data.eval_data:
        read = _read(data, data.eval_data, data.eval_split, encoder.separator, is_held_out=True).rows
        apart = read[: data.max_eval_samples] if data.max_eval_samples else read
        held_out = [step_sample(row, encoder) for row in apart]
        _refuse_too_long(held_out, limit, max_positions)
    else:
        kept, apart = apart_from(kept, data.held_out_rows, seed) if data.held_out_rows else (kept, ())
        held_out = [samples[row.prompt.prompt_id] for row in apart]
    last_only = training.train_on_last_step_only
    units = [
        (_last_step(samples[row.prompt.prompt_id]) if last_only else samples[row.prompt.prompt_id],) for row in kept
    ]
    num_steps = -(-len(kept) // training.train_batch_size) * training.max_epochs
    return StepData(
        loaded=loaded,
        units=tuple(units),
        left_out=left_out,
        limit=limit,
        held_out=tuple(held_out),
        mixture=mixture_of(loaded.specs, kept),
        data_hash=steps_hash(kept),
        num_steps=min(num_steps, training.max_steps) if training.max_steps else num_steps,
        notes=_notes(kept, apart, loaded),
    )


def step_keys(data: PairDataSettings) -> StepKeys:
    """Return the columns of a row."""
    return StepKeys(prompt=data.input_key, steps=data.completions_key, labels=data.labels_key, weight=data.weight_key)


def step_sample(row: LabelledSteps, encoder: StepTextEncoder) -> TrainingSample:
    """Encode a row as the reward model reads it; the tokens that end its labelled steps are those in the loss."""
    prompt = row.prompt
    messages = [message.as_dict() for message in prompt.messages or ()]
    if messages and not encoder.tokenizer.has_chat_template:
        raise DataError(
            code="data.steps_no_template",
            what="the prompt is a conversation, and the model's tokenizer has no chat template",
            where=prompt.prompt_id,
            why="only a template turns the turns of a conversation into one text",
            do="take a model with a chat template, or give the prompt as text",
        )
    text = encoder.encode(prompt.text or "", messages, row.steps)
    ends = [end - text.prompt_length for end in text.ends]
    labels = {end: label for end, label in zip(ends, row.labels, strict=True) if label is not None}
    places = range(len(text.token_ids) - text.prompt_length)
    return TrainingSample(
        prompt.prompt_id,
        text.token_ids,
        text.prompt_length,
        0.0,
        returns=tuple(labels.get(place, 0.0) for place in places),
        loss_mask=tuple(place in labels for place in places),
        weight=row.weight,
        unit=prompt.prompt_id,
    )


def _last_step(sample: TrainingSample) -> TrainingSample:
    """Return the sample with its last labelled step in the loss alone."""
    last = max(place for place, learned in enumerate(sample.loss_mask) if learned)
    return replace(sample, loss_mask=tuple(place == last for place in range(len(sample.loss_mask))))


def _encoded(rows: Sequence[LabelledSteps], encoder: StepTextEncoder, data: PairDataSettings) -> list[TrainingSample]:
    """Encode the rows in their order, `num_workers` threads ahead."""
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    with Prefetcher(
        chunks,
        lambda chunk: [step_sample(row, encoder) for row in chunk],
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
    ) as encoded:
        return [sample for chunk in encoded for sample in chunk]


def _read(data: PairDataSettings, place: str, split: str, separator: str, *, is_held_out: bool = False) -> LoadedSteps:
    flag, shares = ("--eval_data", "") if is_held_out else ("--prompt_data", data.prompt_data_probs)
    specs = located_sources(place, shares or None, split=split, flag=flag)
    loaded = load_steps(specs, step_keys(data), separator, split=split or None)
    for note in loaded.notes:
        _LOG.info("%s", note, extra=ASIDE)
    return loaded


def _refuse_too_long(samples: Sequence[TrainingSample], limit: int, max_positions: int) -> None:
    too_long = [sample for sample in samples if sample.num_tokens > limit]
    if too_long:
        longest = max(sample.num_tokens for sample in too_long)
        raise DataError(
            code="eval.steps_too_long",
            what=f"{len(too_long)} of {len(samples)} held-out rows have more than {limit} tokens; the first is "
            f"{too_long[0].sample_id}, and the longest has {longest}",
            where="--eval_data",
            why="an evaluation that leaves rows out would not be the evaluation that was asked for",
            do=room_for(longest, max_positions, f"remove the rows of more than {limit} tokens"),
        )


def _all_too_long(left_out: Sequence[tuple[str, int]], limit: int, max_positions: int) -> DataError:
    longest = max((length for _, length in left_out), default=limit)
    return DataError(
        code="data.steps_too_long",
        what=f"0 of {len(left_out)} rows have at most {limit} tokens (the longest has {longest})",
        where="--max_len",
        why="a row is used whole or left out, and here all would be left out",
        do=room_for(longest, max_positions, f"shorten the rows to {limit} tokens, or take a model that places more"),
    )


def _notes(kept: Sequence[LabelledSteps], held_out: Sequence[LabelledSteps], loaded: LoadedSteps) -> tuple[str, ...]:
    notes: list[str] = []
    known = {(row.prompt.text, row.prompt.messages) for row in kept}
    shared = sum((row.prompt.text, row.prompt.messages) in known for row in held_out)
    if shared:
        notes.append(f"{shared:,} of {len(held_out):,} held-out rows have a prompt that is trained on too")
    labels = [label for row in kept for label in row.labels if label is not None]
    good = sum(label > 0.5 for label in labels) / len(labels)
    if good in (0.0, 1.0):
        notes.append(f"every step is labelled {'good' if good else 'bad'}: there is nothing to tell apart")
    return (*notes, *loaded.unused)
