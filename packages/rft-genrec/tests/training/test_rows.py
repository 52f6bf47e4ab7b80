"""Files of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.records import Dataset, SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.sft import TaskSettings
from rft_genrec.training.catalogues import chosen_dataset
from rft_genrec.training.rows import held_out_file, training_files


@pytest.fixture
def dataset(catalogue: Path) -> Dataset:
    return chosen_dataset(CatalogueSettings(catalogue=str(catalogue)))[0]


def builder_of(dataset: Dataset) -> PromptBuilder:
    assert dataset.ids is not None
    return PromptBuilder(dataset.ids)


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_same_rows_are_the_same_file(dataset: Dataset) -> None:
    builder = builder_of(dataset)
    files = training_files(dataset, builder, TaskSettings(), ["history", "title"])
    assert files == training_files(dataset, builder, TaskSettings(), ["history", "title"])
    assert [file.name for file in files] == ["history.jsonl", "title.jsonl"]
    assert rows(files[0])[1] == {"name": "train:1", "input": "<a_0><b_0><a_0><b_1>", "output": "<a_0><b_2>"}
    assert len(rows(files[1])) == 6
    held_out = held_out_file(dataset, builder)
    assert held_out is not None
    assert len(rows(held_out)) == 3


def test_sequences_have_a_row_a_person_that_learns_every_item_but_the_first(dataset: Dataset) -> None:
    [file] = training_files(dataset, builder_of(dataset), TaskSettings(rows="sequences"), ["history"])
    found = rows(file)
    assert len(found) == 8
    assert found[0]["input"] == "<a_0><b_0>"
    assert found[0]["output"] == "<a_0><b_1><a_0><b_2><a_1><b_0><a_1><b_1>"


def test_sequences_that_no_token_divides_and_a_split_without_samples_are_refused(dataset: Dataset) -> None:
    ids = SemanticIds((("<a>",), ("<a>", "<b>"), *((f"<{n}>",) for n in range(4))))
    with pytest.raises(OptionsError, match="the ID <a> is the beginning of <a><b>"):
        training_files(dataset, PromptBuilder(ids), TaskSettings(rows="sequences"), ["history"])
    with pytest.raises(DataError) as refused:
        training_files(Dataset(dataset.catalogue, dataset.ids), builder_of(dataset), TaskSettings(), ["history"])
    assert refused.value.problem.code == "genrec.no_samples"
