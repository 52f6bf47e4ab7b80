"""Rows of a catalogue as files, under the hash of what they hold, so that every start of a run finds the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rft.process.cache import cache_directory, written_once
from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.embedding_files import read_embeddings
from rft_genrec.catalogue.records import Dataset, user_sequences
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.tasks import TASKS, TaskInput, TaskRow, sequence_rows, shared_beginnings
from rft_genrec.settings.rules import SIMILAR, WALKS
from rft_genrec.settings.sft import TaskSettings
from rft_genrec.training.similar_items import similar_rows
from rft_genrec.training.walks import NextItems, walk_rows

_ROOM = "recommender_rows"


def stored_rows(rows: Iterable[Mapping[str, Any]], name: str) -> Path | None:
    """Return the file NAME.jsonl of these rows, written where it is not there yet; None where there are none.

    Raises:
        OptionsError: the directory for it has a comma in its path, where a list of files would be divided.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not text:
        return None
    if "," in str(cache_directory()):
        raise OptionsError(
            code="genrec.comma",
            what=f"rows would be written below {cache_directory()}, whose path has a comma",
            where="RFT_CACHE",
            why="files of rows are a list that is joined by commas",
            do="RFT_CACHE with a directory whose path has no comma",
        )
    content = {"rows": hashlib.sha256(text.encode()).hexdigest(), "name": name}

    def write(target: Path) -> None:
        target.mkdir(parents=True)
        (target / f"{name}.jsonl").write_text(text, encoding="utf-8")

    return written_once(_ROOM, content, write) / f"{name}.jsonl"


def no_samples(dataset: Dataset, what: str) -> DataError:
    """Return the error of a catalogue that has nothing to train on."""
    return DataError(
        code="genrec.no_samples",
        what=f"the catalogue {dataset.catalogue.name} has {what}",
        where="--catalogue",
        why="a model is trained on the histories of train.csv",
        do="rft-train genrec data, which writes it",
    )


def training_files(
    dataset: Dataset, builder: PromptBuilder, settings: TaskSettings, tasks: Iterable[str], *, seed: int
) -> list[Path]:
    """Return a file of rows for each task; `seed` is that of the rows that are drawn.

    Raises:
        DataError: the split train has no samples, or a task has no rows.
        OptionsError: sequences, and an ID that another one begins with.
    """
    samples = dataset.of("train")
    if not samples:
        raise no_samples(dataset, "no samples of the split train")
    given = TaskInput(dataset.catalogue, builder, samples)
    files: list[Path] = []
    for task in tasks:
        if task == "history" and settings.rows == "sequences":
            _refuse_shared_beginnings(builder)
            rows = sequence_rows(builder, user_sequences(samples))
        elif task in {SIMILAR, WALKS}:
            _refuse_shared_beginnings(builder)
            rows = _drawn_rows(task, given, settings, seed)
        else:
            rows = TASKS[task](given)
        file = stored_rows(_demonstrations(rows), task)
        if file is None:
            raise DataError(
                code="genrec.no_rows",
                what=f"the task {task} has no rows",
                where="--tasks",
                why="every sample of the split train has an empty history",
                do="leave the task out, or train on a split with histories",
            )
        files.append(file)
    return files


def held_out_file(dataset: Dataset, builder: PromptBuilder) -> Path | None:
    """Return the file of the rows of the split valid, IDs to the next ID; None where there are none."""
    return stored_rows(
        _demonstrations(TASKS["history"](TaskInput(dataset.catalogue, builder, dataset.of("valid")))), "valid"
    )


def _drawn_rows(task: str, given: TaskInput, settings: TaskSettings, seed: int) -> Iterator[TaskRow]:
    num_items = len(given.catalogue)
    file = settings.item_embeddings
    vectors_ND = read_embeddings(Path(file).expanduser(), num_items) if file else None
    if task == SIMILAR:
        assert vectors_ND is not None, "the rules of the command ask for them"
        return similar_rows(given.builder, vectors_ND, num_steps=settings.similar_steps, seed=seed)
    sequences = list(user_sequences(given.samples).values())
    next_items = NextItems(sequences, num_items, embeddings_ND=vectors_ND, text_weight=settings.walk_text_weight)
    return walk_rows(
        given.builder,
        next_items,
        num_items,
        num_walks=settings.walks_per_item,
        num_steps=settings.walk_steps,
        seed=seed,
    )


def _demonstrations(rows: Iterable[TaskRow]) -> Iterator[dict[str, str]]:
    for row in rows:
        yield {"name": row.name, "input": row.prompt, "output": row.response}


def _refuse_shared_beginnings(builder: PromptBuilder) -> None:
    shared = shared_beginnings(builder.ids)
    if shared is not None:
        short, long = ("".join(tokens) for tokens in shared)
        raise OptionsError(
            code="genrec.no_end",
            what=f"rows = sequences, and the ID {short} is the beginning of {long}",
            where="--rows",
            why="within a sequence no token ends an item, so that the model could not tell the two apart",
            do="--rows samples",
        )
