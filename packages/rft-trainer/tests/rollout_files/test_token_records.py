"""Files of token records: the same records come back, in a form that others read; anything else is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rft_core.errors import DataError
from rft_trainer.rollout_files.token_records import (
    TokenRecord,
    read_token_records,
    schema,
    token_file,
    token_files,
    write_token_records,
)

RECORD = TokenRecord(
    prompt_id="train:3",
    sample=1,
    prompt_ids=(5, 6),
    token_ids=(7, 8, 1),
    mask=(True, False, True),
    versions=(4, 4, 5),
    engine_logprobs=(-0.5, 0.0, -0.25),
    trainer_logprobs=(-0.5, 0.0, -0.125),
    entropies=(1.5, 0.0, 0.75),
    reference_logprobs=None,
    advantages=(1.0, 0.0, 1.0),
    reward=0.5,
    status="ok",
    finish_reason="stop",
)
UNSCORED = replace(RECORD, sample=2, reward=None, status="failed", advantages=None, trainer_logprobs=None)


def test_records_come_back_and_make_the_same_bytes(tmp_path: Path) -> None:
    first, second = token_file(tmp_path, 10), token_file(tmp_path, 20)
    for file in (first, second):
        write_token_records(file, [RECORD, UNSCORED])
    assert read_token_records(first) == [RECORD, UNSCORED]
    assert first.read_bytes() == second.read_bytes()
    assert token_files(tmp_path) == {10: first, 20: second}


def test_floats_keep_their_bits_in_a_file(tmp_path: Path) -> None:
    odd = (math.inf, -math.inf, -0.0)
    sent = replace(RECORD, engine_logprobs=odd, trainer_logprobs=None, entropies=(math.nan,) * 3, reward=0.1)
    empty = replace(RECORD, token_ids=(), mask=(), versions=(), engine_logprobs=(), trainer_logprobs=None,
        entropies=(), advantages=None, reward=-math.inf)  # fmt: skip
    write_token_records(token_file(tmp_path, 1), [sent, UNSCORED, empty])
    got, unscored, without = read_token_records(token_file(tmp_path, 1))
    assert struct.pack("3d", *got.engine_logprobs) == struct.pack("3d", *odd)
    assert all(map(math.isnan, got.entropies or ()))
    assert (got.reward, got.trainer_logprobs, unscored, without) == (0.1, None, UNSCORED, empty)


def test_a_step_without_answers_is_a_file_without_rows(tmp_path: Path) -> None:
    file = token_file(tmp_path, 1)
    write_token_records(file, [])
    assert read_token_records(file) == []


def test_any_reader_of_arrow_opens_a_file(tmp_path: Path) -> None:
    file = token_file(tmp_path, 1)
    write_token_records(file, [RECORD])
    with pa.ipc.open_file(str(file)) as reader:
        row = reader.read_all().to_pylist()[0]
    assert row["token_ids"] == [7, 8, 1]
    assert row["reference_logprobs"] is None


def _other_version(file: Path) -> None:
    metadata = {**schema().metadata, b"version": b"2"}
    with pa.ipc.new_file(str(file), schema().with_metadata(metadata)) as writer:
        writer.write_table(schema().empty_table().replace_schema_metadata(metadata))


def _no_form(file: Path) -> None:
    with pa.ipc.new_file(str(file), pa.schema([("a", pa.int32())])) as writer:
        writer.write_table(pa.table({"a": [1]}, schema=pa.schema([("a", pa.int32())])))


def _uneven(file: Path) -> None:
    write_token_records(file, [replace(RECORD, entropies=(1.0,))])


def _cut(file: Path) -> None:
    write_token_records(file, [RECORD])
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_other_version, "its form is 'rft token records', version '2'"),
        (_no_form, "it names no form"),
        (_uneven, "record 1: entropies has 1 entries, 3 tokens"),
        (_cut, "tokens_000001.arrow"),
        (lambda file: file.write_bytes(b""), "tokens_000001.arrow"),
        (lambda file: None, "No such file"),
    ],
)
def test_another_file_is_refused_by_what_it_is(damage: object, said: str, tmp_path: Path) -> None:
    file = token_file(tmp_path, 1)
    assert callable(damage)
    damage(file)
    with pytest.raises(DataError) as caught:
        read_token_records(file)
    assert caught.value.problem.code == "rollouts.token_records"
    assert said in caught.value.problem.what
    assert caught.value.problem.where == str(file)
