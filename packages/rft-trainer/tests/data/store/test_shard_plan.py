"""Division of files into shards."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_trainer.data.readers.json import iter_jsonl
from rft_trainer.data.readers.rows import SkipLog
from rft_trainer.data.store.shard_plan import Place, plan_shards


@pytest.fixture
def sources(tmp_path: Path) -> list[list[Path]]:
    """Five rows with blank lines and a byte order mark, none, three; and seven records in another source."""
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"n":0}\n\n  \n{"n":1}\r\n{"n":2}\n\t\n{"n":3}\n{"n":"\xc3\xa4"}\n\n'
    )
    (tmp_path / "b.jsonl").write_text("\n")
    (tmp_path / "c.jsonl").write_text('{"n":5}\n{"n":6}\n{"n":7}')
    pq.write_table(pa.table({"n": range(7)}), tmp_path / "d.parquet", row_group_size=2)
    return [[tmp_path / f"{name}.jsonl" for name in "abc"], [tmp_path / "d.parquet"]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 100])
def test_shards_hold_every_row_once_whatever_their_size(sources: list[list[Path]], size: int) -> None:
    plans = list(plan_shards(sources, Place(), 0, size))
    assert [plan.number for plan in plans] == list(range(-(-15 // size)))
    assert [plan.num_rows for plan in plans[:-1]] == [size] * (len(plans) - 1)
    spans = [span for plan in plans for span in plan.spans]
    numbers = [(span.begin.source, span.begin.index + step) for span in spans for step in range(span.num_rows)]
    assert numbers == [(0, n) for n in range(8)] + [(1, n) for n in range(7)]


def test_rows_are_read_from_where_a_span_begins(sources: list[list[Path]]) -> None:
    plans = plan_shards(sources[:1], Place(), 0, 2)
    for span in (span for plan in plans for span in plan.spans):
        begin = span.begin
        rows = list(iter_jsonl(sources[0][begin.file], SkipLog(), after_line=begin.line, offset=begin.offset))[
            : span.num_rows
        ]
        whole = list(iter_jsonl(sources[0][begin.file], SkipLog()))
        first = begin.index - (5 if begin.file == 2 else 0)
        assert rows == whole[first : first + span.num_rows]


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_a_plan_goes_on_behind_any_shard(sources: list[list[Path]], size: int) -> None:
    whole = list(plan_shards(sources, Place(), 0, size))
    for number, plan in enumerate(whole):
        assert list(plan_shards(sources, plan.end, number + 1, size)) == whole[number + 1 :]
