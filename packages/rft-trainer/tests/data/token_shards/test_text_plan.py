"""Division of texts: every byte in one shard, cuts where no token changes, and the place of what is held out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_shards_doubles import mapped

from rft_core.errors import DataError
from rft_trainer.data.token_shards import text_plan as module
from rft_trainer.data.token_shards.text_plan import (
    Cut,
    TextRange,
    TextStream,
    held_out_cut,
    line_end,
    size_of,
    text_cut,
)


def ranges(stream: TextStream, bytes_of_shard: int) -> list[list[tuple[int, int, int]]]:
    """Return (file, begin, end) of each shard's ranges."""
    plans = [*stream.plans(bytes_of_shard)]
    assert [plan.number for plan in plans] == [*range(len(plans))]
    return [[(part.file, part.begin, part.end) for part in plan.ranges] for plan in plans]


def test_a_text_is_cut_behind_line_ends_that_no_space_follows(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\ntwo\n\n three\nfour\nfive")
    assert ranges(TextStream((file,)), 5) == [[(0, 0, 8 + 8)], [(0, 16, 21)], [(0, 21, 25)]]


@pytest.mark.parametrize(
    ("text", "offset", "place"),
    [
        ("ab\ncd", 2, 3),
        ("ab\n cd\ne", 2, 7),
        ("a b  c d", 2, 6),
        ("word moremore", 3, 4),
        ("abcdefghijkl", 3, 3),
        # two bytes a character: no character is cut
        ("ééééé", 3, 4),
        # a space that is no ASCII follows the line end
        ("ab\n\u3000cdef", 2, 2),
        # what is left is short
        ("ab\n", 2, 3),
        ("abcdefgh", 4, 8),
    ],
)
def test_places_of_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, offset: int, place: int) -> None:
    monkeypatch.setattr(module, "_LOOKED", 6)
    with mapped(tmp_path / "a.txt", text.encode()) as raw:
        assert text_cut(raw, offset) == place


def test_a_text_with_a_separator_is_cut_behind_it_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n--\nthree\n--\nfour")
    assert ranges(TextStream((file,), "\n--\n"), 4) == [[(0, 0, 11)], [(0, 11, 20)], [(0, 20, 24)]]
    # the aim lies inside the second separator
    assert ranges(TextStream((file,), "\n--\n"), 17) == [[(0, 0, 20)], [(0, 20, 24)]]


def test_rows_are_cut_at_line_ends_and_know_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "x" * n}) + "\n" for n in range(4)]
    file.write_text("".join(lines))
    plans = [*TextStream((file,)).plans(len(lines[0]) + 1)]
    assert [plan.ranges[0].first_line for plan in plans] == [1, 3, 4]
    assert [plan.ranges[0].begin for plan in plans] == [0, sum(map(len, lines[:2])), sum(map(len, lines[:3]))]
    # from a place in the middle of the file on
    begun = TextStream((file,), begin=Cut(0, len(lines[0])))
    assert next(begun.plans()).ranges == (TextRange(0, len(lines[0]), file.stat().st_size, 2),)


def test_records_of_parquet_are_cut_by_their_mean_size(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 100] * 10}), file, compression="none", use_dictionary=False)
    parts = ranges(TextStream((file,)), 350)
    assert [end for ((_, _, end),) in parts][-1] == size_of(file) == 10
    assert 3 <= len(parts) <= 5
    assert all(earlier[0][2] == later[0][1] for earlier, later in pairwise(parts))


def test_small_files_share_a_shard(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{number}.txt" for number in range(5))
    for file in files:
        file.write_text("abcd")
    shards = ranges(TextStream(files), 8)
    assert shards == [[(0, 0, 4), (1, 0, 4)], [(2, 0, 4), (3, 0, 4)], [(4, 0, 4)]]
    assert ranges(TextStream(files, begin=Cut(1, 2), end=Cut(3, 1)), 8) == [[(1, 2, 4), (2, 0, 4), (3, 0, 1)]]


@pytest.mark.parametrize(("share", "place"), [(0.1, 9), (0.25, 7), (0.999, 0)])
def test_held_out_characters_are_counted_as_characters(tmp_path: Path, share: float, place: int) -> None:
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    texts = ["ab€é", "ééßxyz"]
    # a byte order mark is no character
    files[0].write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    files[1].write_text(texts[1])
    cut = held_out_cut(files, share)
    kept = "".join(texts)[:place]
    before = files[0].read_bytes() if cut.file else b""
    read = (before + files[cut.file].read_bytes()[: cut.offset]).decode("utf-8-sig")
    assert read == kept


def test_held_out_rows_begin_at_a_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(10)))
    cut = held_out_cut([file], 0.25)
    assert [json.loads(line)["text"] for line in file.read_bytes()[cut.offset :].splitlines()] == ["8", "9"]
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(n) for n in range(10)]}), table)
    assert held_out_cut([table], 0.25) == Cut(0, 7)
    # in the second of two files of one size
    assert held_out_cut([table, table], 0.25) == Cut(1, 5)


def test_a_line_end_at_the_place_counts(tmp_path: Path) -> None:
    with mapped(tmp_path / "a.txt", b"ab\ncd") as raw:
        assert [line_end(raw, place) for place in (1, 3, 4)] == [3, 3, 5]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="0 bytes"):
        [*TextStream((tmp_path / "a.txt",)).plans()]
