"""Preference rows: pairs of responses of which one is better, and responses that are labelled good or bad."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.columns import Columns
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.preference_rows.preference_columns import IMPLICIT, Divided, LabelledKeys, PreferenceKeys, divided
from rft_trainer.data.prompts import PromptRow, content_hash, prompt_of
from rft_trainer.data.readers.rows import Row, SkipLog, shown, wrong_type
from rft_trainer.data.sources import SourceSpec, files_of, rows_of_source

_GOOD = ("desirable", "good", "chosen", "true", "yes", "1", "+1")
_BAD = ("undesirable", "bad", "rejected", "false", "no", "0", "-1")
_OUTCOMES: Mapping[str, float] = {
    **dict.fromkeys(("chosen", "a", "1", "+1"), 1.0),
    **dict.fromkeys(("rejected", "b", "-1"), -1.0),
    **dict.fromkeys(("tie", "c", "0", "equal"), 0.0),
    "none": 2.0,
}
"""Words for which response is the better; a field that is null is not labelled."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to a prompt, of which the first is better.

    Example: `PreferencePair(PromptRow("p:0", "1+1?", None, None, None, "p", 0), " 2", " 3")`
    """

    prompt: PromptRow
    """The prompt, without label and output; its id is that of the pair, and the images are its."""
    chosen: str
    rejected: str
    margin: float = 0.0
    """By how much the chosen response is better, in units of reward."""
    weight: float = 1.0
    """Weight of the pair in the loss, above 0."""
    outcomes: tuple[float, ...] = ()
    """Of each column that says which response is the better, as in `rft_trainer.records.pairs`: 1 the chosen one, -1
    the rejected one, 0 neither, 2 not labelled; empty without such columns."""

    @property
    def pair_id(self) -> str:
        """Return the id of the pair, "<source>:<row index>"."""
        return self.prompt.prompt_id


@dataclass(frozen=True, slots=True)
class LabelledResponse:
    """A response to a prompt that is labelled good or bad, and compared with no other.

    Example: `LabelledResponse(PromptRow("p:0", "1+1?", None, None, None, "p", 0), " 2", desirable=True)`
    """

    prompt: PromptRow
    """The prompt, without label and output; its id is that of the response."""
    response: str
    desirable: bool
    weight: float = 1.0
    """Weight of the response in the loss, above 0."""


@dataclass(frozen=True, slots=True)
class LoadedPairs:
    """All pairs of a run in global order (source after source), with their sources and files."""

    pairs: tuple[PreferencePair, ...]
    specs: tuple[SourceSpec, ...]
    files: tuple[str, ...]
    content_hash: str
    skipped: SkipLog
    equal: tuple[str, ...] = ()
    """Ids of pairs that were left out since both responses are the same text: they say nothing."""
    notes: tuple[str, ...] = ()
    """A sentence on each source whose columns were found by their form."""
    unused: tuple[str, ...] = ()
    """A sentence on each source that has columns which nothing reads."""

    @property
    def prompts(self) -> list[PromptRow]:
        """Return the prompt of every row."""
        return [pair.prompt for pair in self.pairs]


@dataclass(frozen=True, slots=True)
class LoadedLabels:
    """All labelled responses of a run in global order, with their sources and files."""

    responses: tuple[LabelledResponse, ...]
    specs: tuple[SourceSpec, ...]
    files: tuple[str, ...]
    content_hash: str
    skipped: SkipLog
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    """None: a response that is compared with no other is equal to none."""

    @property
    def prompts(self) -> list[PromptRow]:
        """Return the prompt of every row."""
        return [response.prompt for response in self.responses]


def load_pairs(
    specs: Sequence[SourceSpec],
    keys: PreferenceKeys,
    *,
    split: str | None = None,
    chat: bool = False,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
) -> LoadedPairs:
    """Read the pairs of every source; errors as `read_rows` and `pairs_from_rows` raise them.

    Raises:
        DataError: in every pair both responses are equal.
    """
    skips = skips if skips is not None else SkipLog()
    pairs: list[PreferencePair] = []
    equal: list[str] = []
    notes: list[str] = []
    unused: list[str] = []
    for spec in specs:
        rows = rows_of_source(spec, split=split, skips=skips)
        found = keys.found_in(present_columns(rows))
        read = pairs_from_rows(rows, source=spec.name, keys=found, chat=chat, skips=skips, images=images)
        equal += [pair.pair_id for pair in read if pair.chosen == pair.rejected]
        pairs += [pair for pair in read if pair.chosen != pair.rejected]
        own_notes, own_unused = notes_on_columns(spec.name, rows, keys, images.key if images is not None else "")
        notes += own_notes
        unused += own_unused
    if equal and not pairs:
        raise all_equal(specs, len(equal))
    return LoadedPairs(
        tuple(pairs),
        tuple(specs),
        source_files(specs, split),
        pairs_hash(pairs),
        skips,
        tuple(equal),
        (*notes,),
        (*unused,),
    )


def load_labels(
    specs: Sequence[SourceSpec],
    keys: LabelledKeys,
    *,
    split: str | None = None,
    chat: bool = False,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
) -> LoadedLabels:
    """Read the labelled responses of every source; errors as `read_rows` and `labels_from_rows` raise them."""
    skips = skips if skips is not None else SkipLog()
    responses: list[LabelledResponse] = []
    notes: list[str] = []
    unused: list[str] = []
    for spec in specs:
        rows = rows_of_source(spec, split=split, skips=skips)
        found = keys.found_in(present_columns(rows))
        responses += labels_from_rows(rows, source=spec.name, keys=found, chat=chat, skips=skips, images=images)
        words = {"the prompt": found.prompt, "the response": found.completion, "the label": found.label}
        notes += [f"{spec.name}: {note_on(words, rows)}"] if found != keys else []
        unused += unused_columns(
            spec.name, rows, (*words.values(), found.weight, images.key if images is not None else "")
        )
    digest = labels_hash(responses)
    return LoadedLabels(
        tuple(responses), tuple(specs), source_files(specs, split), digest, skips, tuple(notes), tuple(unused)
    )


def notes_on_columns(
    name: str, rows: Sequence[Row], keys: PreferenceKeys, images: str = ""
) -> tuple[list[str], list[str]]:
    """Return (which columns of a source are what, where `keys` leave it open; which columns nothing reads).

    Args:
        name: of the source.
        rows: at least its first one, whose columns are those of the source.
        keys: the columns that the settings name.
        images: column of the images, where there is one.
    """
    found = keys.found_in(present_columns(rows))
    words = {"the prompt": found.prompt, "the better response": found.chosen, "the worse one": found.rejected}
    notes = [f"{name}: {note_on(words, rows)}"] if found != keys else []
    read_too = (found.margin, found.weight, *found.outcomes, images)
    return notes, unused_columns(name, rows, (*words.values(), *read_too))


def pairs_from_rows(
    rows: Sequence[Row],
    *,
    source: str,
    keys: PreferenceKeys,
    chat: bool = False,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
    first: int = 0,
) -> list[PreferencePair]:
    """Build one pair a row from the columns `keys`, also where both responses are equal; `first` is the first's number.

    With `chat` the texts of hh-rlhf become messages. Raises `DataError` for a missing (`MissingColumnError`), null or
    wrongly typed field, responses to different prompts, and, with `images`, as `prompts_from_rows` does.
    """
    skips = skips if skips is not None else SkipLog()
    named = {"--chosen_key": keys.chosen, "--rejected_key": keys.rejected}
    columns = used_columns(rows, {**named, "--input_key": keys.prompt}, keys.margin, keys.weight)
    says = "--outcome_key" if len(keys.outcomes) < 2 else "--heads_types"
    pairs: list[PreferencePair] = []
    for index, row in enumerate(rows, start=first):
        try:
            parts = divided(row, keys.prompt, named, columns, chat=chat)
            prompt = row_prompt(parts, source, index, columns, images)
            margin = _number(row, keys.margin, "--margin_key", columns, 0.0)
            weight = row_weight(row, keys.weight, columns)
            outcomes = tuple(_outcome(row, key, says, columns) for key in keys.outcomes)
        # the row is left out and keeps its number, so that the ids of later rows do not move
        except DataError as error:
            skips.take(error)
            continue
        chosen, rejected = parts.responses
        pairs.append(PreferencePair(prompt, chosen, rejected, margin, weight, outcomes))
    return pairs


def labels_from_rows(
    rows: Sequence[Row],
    *,
    source: str,
    keys: LabelledKeys,
    chat: bool = False,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
) -> list[LabelledResponse]:
    """Build one labelled response a row; a label is true or false, 1, 0 or -1, or a word such as "desirable".

    Raises `DataError` as `pairs_from_rows` does, and for a label that is neither good nor bad.
    """
    skips = skips if skips is not None else SkipLog()
    named = {"--output_key": keys.completion}
    columns = used_columns(rows, {**named, "--input_key": keys.prompt, "--label_key": keys.label}, "", keys.weight)
    responses: list[LabelledResponse] = []
    for index, row in enumerate(rows):
        try:
            parts = divided(row, keys.prompt, named, columns, chat=chat)
            prompt = row_prompt(parts, source, index, columns, images)
            desirable = _desirable(row, keys.label, columns)
            weight = row_weight(row, keys.weight, columns)
        except DataError as error:
            skips.take(error)
            continue
        responses.append(LabelledResponse(prompt, parts.responses[0], desirable, weight))
    return responses


def labelled(pairs: Sequence[PreferencePair]) -> list[LabelledResponse]:
    """Return the responses of pairs as labelled ones, chosen before rejected; both have the prompt's id."""
    found: list[LabelledResponse] = []
    for pair in pairs:
        found.append(LabelledResponse(pair.prompt, pair.chosen, True, pair.weight))
        found.append(LabelledResponse(pair.prompt, pair.rejected, False, pair.weight))
    return found


def pairs_hash(pairs: Sequence[PreferencePair]) -> str:
    """Compute the SHA-256 of prompts, responses, margins, weights, outcomes in order: equal only for the same data."""
    values = [[p.chosen, p.rejected, p.margin, p.weight, *p.outcomes] for p in pairs]
    return _hash([pair.prompt for pair in pairs], values)


def labels_hash(responses: Sequence[LabelledResponse]) -> str:
    """Compute the SHA-256 of prompts, responses, labels and weights in order."""
    return _hash([r.prompt for r in responses], [[r.response, r.desirable, r.weight] for r in responses])


def _hash(prompts: Sequence[PromptRow], values: Sequence[list[Any]]) -> str:
    digest = hashlib.sha256(content_hash(prompts).encode())
    for value in values:
        digest.update(json.dumps(value).encode() + b"\n")
    return digest.hexdigest()


def present_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of the first row."""
    return list(rows[0].fields) if rows else []


def source_files(specs: Sequence[SourceSpec], split: str | None) -> tuple[str, ...]:
    """Return the files of all sources."""
    return tuple(
        file for spec in specs for file in (map(str, spec.files) if spec.files else files_of(spec.path, split=split))
    )


def used_columns(rows: Sequence[Row], named: Mapping[str, str], margin: str, weight: str) -> Columns:
    """Return the columns in use, by the settings that name them."""
    used = {**named, "--margin_key": margin, "--weight_key": weight}
    return Columns(rows, {flag: key for flag, key in used.items() if key})


def row_prompt(parts: Divided, source: str, index: int, columns: Columns, images: ImageColumn | None) -> PromptRow:
    """Return the prompt of a row."""
    text, messages, pictures = prompt_of(parts.row, parts.prompt_key, columns, images)
    return PromptRow(f"{source}:{index}", text, messages, None, None, source, index, pictures, place=parts.row.where())


def _number(row: Row, key: str, flag: str, columns: Columns, default: float) -> float:
    """Return the number in a column, which a file of text holds as text; the default without a column."""
    if not key:
        return default
    value = columns.field(row, key, flag)
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise wrong_type(row, key, f"{type(value).__name__} {shown(value)}", "the field must be a finite number")
    return number


def row_weight(row: Row, key: str, columns: Columns) -> float:
    """Return the weight of a row, above 0; 1 without a column."""
    weight = _number(row, key, "--weight_key", columns, 1.0)
    if weight <= 0:
        raise wrong_type(row, key, f"{weight:g}", "a weight is above 0; a row without one can be left out")
    return weight


def _outcome(row: Row, key: str, flag: str, columns: Columns) -> float:
    value = columns.field(row, key, flag)
    word = str(value).strip().lower().removesuffix(".0")
    if isinstance(value, bool) or word not in _OUTCOMES:
        why = "it is chosen (or A, 1), rejected (B, -1) or tie (C, 0); null where nobody has compared them"
        raise wrong_type(row, key, f"{type(value).__name__} {shown(value)}", why)
    return _OUTCOMES[word]


def _desirable(row: Row, key: str, columns: Columns) -> bool:
    value = columns.field(row, key, "--label_key")
    word = str(value).strip().lower().removesuffix(".0")
    if word in _GOOD or word in _BAD:
        return word in _GOOD
    why = "a label is true or false, 1, 0 or -1, desirable or undesirable"
    raise wrong_type(row, key, f"{type(value).__name__} {shown(value)}", why)


def note_on(words: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return which columns are what."""
    parts: list[str] = []
    for meaning, key in words.items():
        if key == IMPLICIT:
            parts.append(f"what the responses begin with is {meaning}")
        elif key == "instruction" and rows and "input" in rows[0].fields:
            parts.append(f"instruction with input is {meaning}")
        else:
            parts.append(f"{key} is {meaning}")
    return ", ".join(parts)


def unused_columns(name: str, rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return a sentence on the columns of a source that nothing reads."""
    # a key may reach into a column, as `input.messages` does
    used = {part for key in keys if key for part in (key, key.partition(".")[0])}
    used |= {"input"} if "instruction" in keys else set()
    unused = [column for column in present_columns(rows) if column not in used]
    return [f"{name}: not used: {', '.join(unused)}"] if unused else []


def all_equal(specs: Sequence[SourceSpec], count: int) -> DataError:
    """Return the error of sources in which every pair has two equal responses."""
    return DataError(
        code="data.equal_responses",
        what=f"in all {count} pairs the better response is the worse one too",
        where=", ".join(spec.path for spec in specs),
        why="a pair of equal responses says nothing, and such pairs are left out",
        do="name the two columns with --chosen_key and --rejected_key",
    )
