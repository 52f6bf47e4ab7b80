"""Files of rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.catalogue.records import Dataset, SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.sft import TaskSettings
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
    files = training_files(dataset, builder, TaskSettings(), ["history", "title"], seed=0)
    assert files == training_files(dataset, builder, TaskSettings(), ["history", "title"], seed=0)
    assert [file.name for file in files] == ["history.jsonl", "title.jsonl"]
    assert rows(files[0])[1] == {"name": "train:1", "input": "<a_0><b_0><a_0><b_1>", "output": "<a_0><b_2>"}
    assert len(rows(files[1])) == 6
    held_out = held_out_file(dataset, builder)
    assert held_out is not None
    assert len(rows(held_out)) == 3


def test_sequences_have_a_row_a_person_that_learns_every_item_but_the_first(dataset: Dataset) -> None:
    [file] = training_files(dataset, builder_of(dataset), TaskSettings(rows="sequences"), ["history"], seed=0)
    found = rows(file)
    assert len(found) == 8
    assert found[0]["input"] == "<a_0><b_0>"
    assert found[0]["output"] == "<a_0><b_1><a_0><b_2><a_1><b_0><a_1><b_1>"


def test_the_task_similar_begins_a_row_at_every_item(dataset: Dataset, tmp_path: Path) -> None:
    vectors = np.eye(len(dataset.catalogue), 4, dtype=np.float32) + 0.1
    np.save(tmp_path / "vectors.npy", vectors)
    settings = TaskSettings(tasks="similar", item_embeddings=str(tmp_path / "vectors.npy"), similar_steps=2)
    [file] = training_files(dataset, builder_of(dataset), settings, ["similar"], seed=0)
    found = rows(file)
    assert [row["name"] for row in found] == [f"similar:{item}" for item in range(len(dataset.catalogue))]
    assert all(row["output"].count("<a_") == 2 for row in found)


def test_the_task_walks_begins_rows_at_every_item_with_vectors_and_without(dataset: Dataset, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.eye(len(dataset.catalogue), 4, dtype=np.float32) + 0.1)
    settings = TaskSettings(tasks="walks", walks_per_item=3, walk_steps=2)
    texts = replace(settings, item_embeddings=str(tmp_path / "vectors.npy"), walk_text_weight=5.0)
    [plain], [with_texts] = (
        training_files(dataset, builder_of(dataset), one, ["walks"], seed=0) for one in (settings, texts)
    )
    for file in (plain, with_texts):
        found = rows(file)
        names = [f"walk:{item}:{n}" for item in range(len(dataset.catalogue)) for n in range(3)]
        assert [row["name"] for row in found] == names
        assert all(row["output"].count("<a_") == 2 for row in found)
    assert rows(plain) != rows(with_texts)


def test_sequences_that_no_token_divides_and_a_split_without_samples_are_refused(dataset: Dataset) -> None:
    ids = SemanticIds((("<a>",), ("<a>", "<b>"), *((f"<{n}>",) for n in range(4))))
    with pytest.raises(OptionsError, match="the ID <a> is the beginning of <a><b>"):
        training_files(dataset, PromptBuilder(ids), TaskSettings(rows="sequences"), ["history"], seed=0)
    with pytest.raises(DataError) as refused:
        training_files(
            Dataset(dataset.catalogue, dataset.ids), builder_of(dataset), TaskSettings(), ["history"], seed=0
        )
    assert refused.value.problem.code == "genrec.no_samples"


def test_a_directory_of_rows_whose_path_has_a_comma_is_refused(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "a,b"))
    with pytest.raises(OptionsError) as refused:
        training_files(dataset, builder_of(dataset), TaskSettings(), ["history"], seed=0)
    assert [problem.code for problem in refused.value.problems] == ["genrec.comma"]
    assert not (tmp_path / "a,b").exists()
