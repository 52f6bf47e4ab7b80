"""Texts of a shard: documents, their pieces, and where what is wrong with them is told to be."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.errors import DataError
from rft_trainer.data.token_shards.pieces import cut_text, pieces_of
from rft_trainer.data.token_shards.text_plan import Cut, TextStream


def documents(stream: TextStream, bytes_of_shard: int) -> list[str]:
    """Return the documents of all shards; a piece that goes on with one is added to it."""
    found: list[str] = []
    for plan in stream.plans(bytes_of_shard):
        for piece in pieces_of(stream, plan):
            if piece.begins_document or not found:
                found.append(piece.text)
            else:
                found[-1] += piece.text
    return found


@pytest.mark.parametrize("bytes_of_shard", [1, 3, 7, 20, 1000])
def test_any_division_gives_the_same_documents(tmp_path: Path, bytes_of_shard: int) -> None:
    texts = ["first\nof two lines", "", "é second", " third "]
    plain, separated = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    separated.write_text("<|end|>".join(texts))
    rows = tmp_path / "c.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) + "\n" for text in texts) + '{"text": "no line end"}')
    table = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": texts}), table, row_group_size=2)
    other = tmp_path / "e.json"
    other.write_text(json.dumps([{"text": text} for text in texts]))
    filled = [text for text in texts if text]
    assert documents(TextStream((plain,)), bytes_of_shard) == [texts[0]]
    assert documents(TextStream((separated,), "<|end|>"), bytes_of_shard) == filled
    assert documents(TextStream((rows,)), bytes_of_shard) == [*filled, "no line end"]
    assert documents(TextStream((table, other)), bytes_of_shard) == filled * 2
    assert documents(TextStream((table,), begin=Cut(0, 2), end=Cut(0, 3)), bytes_of_shard) == ["é second"]


@given(st.text(alphabet="a b\n\té", max_size=60), st.integers(2, 9))
def test_pieces_are_the_text_and_none_is_longer(text: str, most: int) -> None:
    pieces = [*cut_text(text, most)]
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= most for piece in pieces)


def test_a_piece_ends_behind_a_line_or_before_a_space() -> None:
    assert [*cut_text("ab\ncd\n e fg", 7)] == ["ab\n", "cd\n e", " fg"]
    assert [*cut_text("abcdefgh", 3)] == ["abc", "def", "gh"]


def test_a_row_without_text_is_named_with_a_column_that_has_some(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n{"body": "bad", "n": 1}\n')
    stream = TextStream((file,))
    with pytest.raises(DataError) as caught:
        documents(stream, 10)
    problem = caught.value.problem
    assert (problem.where, problem.do) == (f"{file}:2:text", "--text_key body")
    assert "n" in problem.what


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(DataError) as caught:
        documents(TextStream((file,)), 4)
    assert caught.value.problem.where == f"{file}:3:4"
    assert "byte 11" in caught.value.problem.what
