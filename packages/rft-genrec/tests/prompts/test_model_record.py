"""genrec.json."""

from dataclasses import replace
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import FILE, ModelRecord, builder_of, read_record

IDS = SemanticIds((("<a_0>", "<b_1>"), ("<a_2>", "<b_0>")))
BUILDER = PromptBuilder(IDS, 3, "instruction")


def code(directory: Path, ids: SemanticIds = IDS) -> str:
    with pytest.raises(DataError) as refused:
        builder_of(directory, ids)
    return refused.value.problem.code


def test_a_model_is_asked_with_the_builder_that_it_was_trained_with(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert code(tmp_path) == "genrec.no_record"
    ModelRecord.of(BUILDER).write(tmp_path)
    assert builder_of(tmp_path, IDS) == BUILDER


def test_other_ids_other_prompts_and_a_damaged_record_are_refused(tmp_path: Path) -> None:
    ModelRecord.of(BUILDER).write(tmp_path)
    assert code(tmp_path, SemanticIds(IDS.tokens_by_item[::-1])) == "genrec.other_ids"
    replace(ModelRecord.of(BUILDER), max_history=4).write(tmp_path)
    assert code(tmp_path) == "genrec.other_prompts"
    for text in ("{", "[1]", '{"ids": 3}'):
        (tmp_path / FILE).write_text(text)
        assert code(tmp_path) == "genrec.damaged_record"
