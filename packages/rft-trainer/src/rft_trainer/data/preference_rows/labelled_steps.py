"""Rows of responses whose steps are labelled good or bad, in TRL's columns: prompt, completions, labels."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.columns import Columns
from rft_trainer.data.preference_rows.preference_columns import StepKeys, divided
from rft_trainer.data.preference_rows.preferences import (
    note_on,
    present_columns,
    row_prompt,
    row_weight,
    source_files,
    unused_columns,
    used_columns,
)
from rft_trainer.data.prompts import PromptRow, content_hash
from rft_trainer.data.readers.rows import Row, SkipLog, shown, wrong_type
from rft_trainer.data.sources import SourceSpec, rows_of_source


@dataclass(frozen=True, slots=True)
class LabelledSteps:
    """The steps of a response to a prompt, each with its label.

    Example: `LabelledSteps(PromptRow("p:0", "1+1+1?", None, None, None, "p", 0), ("1+1=2", "2+1=4"), (1.0, 0.0))`
    """

    prompt: PromptRow
    """The prompt, without label and output; its id is that of the row."""
    steps: tuple[str, ...]
    labels: tuple[float | None, ...]
    """One a step: 1 good, 0 bad, between them the probability that it is good, None where nobody has said."""
    weight: float = 1.0
    """Weight of each of its steps in the loss, above 0."""


@dataclass(frozen=True, slots=True)
class LoadedSteps:
    """All rows of a run in global order (source after source), with their sources and files."""

    rows: tuple[LabelledSteps, ...]
    specs: tuple[SourceSpec, ...]
    files: tuple[str, ...]
    content_hash: str
    skipped: SkipLog
    notes: tuple[str, ...] = ()
    """A sentence on each source whose columns were found by their form."""
    unused: tuple[str, ...] = ()
    """A sentence on each source that has columns which nothing reads."""

    @property
    def prompts(self) -> list[PromptRow]:
        """Return the prompt of every row."""
        return [row.prompt for row in self.rows]


def load_steps(
    specs: Sequence[SourceSpec],
    keys: StepKeys,
    separator: str,
    *,
    split: str | None = None,
    skips: SkipLog | None = None,
) -> LoadedSteps:
    """Read the rows of every source; errors as `read_rows` and `steps_from_rows` raise them."""
    skips = skips if skips is not None else SkipLog()
    found: list[LabelledSteps] = []
    notes: list[str] = []
    unused: list[str] = []
    for spec in specs:
        rows = rows_of_source(spec, split=split, skips=skips)
        own = keys.found_in(present_columns(rows))
        found += steps_from_rows(rows, source=spec.name, keys=own, separator=separator, skips=skips)
        words = {"the prompt": own.prompt, "the steps": own.steps, "the labels": own.labels}
        notes += [f"{spec.name}: {note_on(words, rows)}"] if own != keys else []
        unused += unused_columns(spec.name, rows, (*words.values(), own.weight))
    files, digest = source_files(specs, split), steps_hash(found)
    return LoadedSteps(tuple(found), tuple(specs), files, digest, skips, tuple(notes), tuple(unused))


def steps_from_rows(
    rows: Sequence[Row], *, source: str, keys: StepKeys, separator: str, skips: SkipLog | None = None
) -> list[LabelledSteps]:
    """Build one `LabelledSteps` a row.

    Raises:
        DataError: a field is missing (`MissingColumnError`) or of another kind, there are not as many labels as steps,
            a step is empty or holds the separator, a label is no number in [0, 1], or a row has no label at all.
    """
    skips = skips if skips is not None else SkipLog()
    named = {"--input_key": keys.prompt, "--completions_key": keys.steps, "--labels_key": keys.labels}
    columns = used_columns(rows, named, "", keys.weight)
    found: list[LabelledSteps] = []
    for index, row in enumerate(rows):
        try:
            prompt = row_prompt(divided(row, keys.prompt, {}, columns, chat=False), source, index, columns, None)
            steps, labels = _steps(row, keys.steps, separator, columns), _labels(row, keys.labels, columns)
            if len(steps) != len(labels):
                what = f"{len(labels)} labels for the {len(steps)} steps of {keys.steps}"
                raise wrong_type(row, keys.labels, what, "every step has one label; null where nobody has judged it")
            weight = row_weight(row, keys.weight, columns)
        # the row is left out and keeps its number, so that the ids of later rows do not move
        except DataError as error:
            skips.take(error)
            continue
        found.append(LabelledSteps(prompt, steps, labels, weight))
    return found


def steps_hash(rows: Sequence[LabelledSteps]) -> str:
    """Compute the SHA-256 of prompts, steps, labels and weights in order: equal only for the same data."""
    digest = hashlib.sha256(content_hash([row.prompt for row in rows]).encode())
    for row in rows:
        digest.update(json.dumps([row.steps, row.labels, row.weight]).encode() + b"\n")
    return digest.hexdigest()


def _steps(row: Row, key: str, separator: str, columns: Columns) -> tuple[str, ...]:
    steps: list[str] = []
    for number, value in enumerate(_list(row, key, "--completions_key", columns)):
        place = f"{key}[{number}]"
        if not isinstance(value, str):
            raise wrong_type(row, place, f"{type(value).__name__} {shown(value)}", "a step is a text")
        # as a response is divided that is scored; a separator at either end adds none
        parts = [part for part in value.split(separator) if part.strip()]
        if not parts:
            raise wrong_type(row, place, f"the empty step {shown(value)}", "a step must have text")
        if len(parts) > 1:
            what = f"a step with the separator of steps {separator!r} in it: {shown(value)}"
            why = f"a response of the same text would be divided there, and scored as {len(parts)} steps"
            raise wrong_type(row, place, what, why, do=r"--step_separator '\n\n', or another text that no step holds")
        steps.append(parts[0])
    return tuple(steps)


def _labels(row: Row, key: str, columns: Columns) -> tuple[float | None, ...]:
    labels: list[float | None] = []
    for number, value in enumerate(_list(row, key, "--labels_key", columns)):
        labels.append(None if value is None else _label(row, f"{key}[{number}]", value))
    if all(label is None for label in labels):
        raise wrong_type(row, key, f"no label of {len(labels)}", "a row of which no step is judged teaches nothing")
    return tuple(labels)


def _label(row: Row, place: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        why = "a label is true or 1 for a good step, false or 0 for a bad one, or the probability that it is good"
        raise wrong_type(row, place, f"{type(value).__name__} {shown(value)}", why)
    return number


def _list(row: Row, key: str, flag: str, columns: Columns) -> list[Any]:
    value = columns.field(row, key, flag)
    # lists of Arrow files are arrays
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple) or not values:
        what = "an empty list" if values == [] else f"{type(value).__name__} {shown(value)}"
        raise wrong_type(row, key, what, "the field is a list with an entry a step")
    return list(values)
