"""Rows of data files of every form."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_core.errors import DataError
from rft_genrec.interactions.row_files import read_rows, separated_rows
from rft_genrec.interactions.schemas import Column, RowReader

COLUMNS = (Column("who", "name", "the person"), Column("note", "text", "a note", required=False))
EXPECTED = [("ann", 'a "b", c'), ("bob", "")]


def read(path: Path) -> list[tuple[object, ...]]:
    return [*read_rows(RowReader(path, COLUMNS))]


def test_all_forms_give_the_same_rows(tmp_path: Path) -> None:
    csv = '\ufeffnote,who,more\r\n"a ""b"", c",ann,1\r\n,bob,2\r\n'.encode()
    files = {
        "a.csv": csv,
        "a.csv.gz": gzip.compress(csv),
        "a.tsv": b'who\tnote\nann\t"a ""b"", c"\nbob\t\n',
        "a.jsonl": b'{"who": "ann", "note": "a \\"b\\", c"}\n\n{"who": "bob", "note": null}\n',
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == EXPECTED
    pq.write_table(pa.table({"note": ['a "b", c', None], "who": ["ann", "bob"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == EXPECTED


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"who": "ann"}\n{"who": __import__("os")}\n', "row 2: expected a JSON object"),
        ("a.jsonl", '{"who": "ann", "note": NaN}\n', "row 1: expected a JSON object"),
        ("a.jsonl", '["ann"]\n', "row 1: expected a JSON object"),
        ("a.jsonl", "[" * 50_000 + "\n", "row 1: expected a JSON object"),
        ("a.csv", "note\nx\n", "column who is missing"),
        ("a.csv", "who,note\nann\n", "row 2: expected 2 cells"),
        ("a.parquet", "PAR1", "cannot be read"),
        ("a.xlsx", "", "is a file .xlsx"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        read(tmp_path / name)


def test_cells_may_be_divided_by_several_signs(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(b"1::caf\xe9::x\n2\n")
    (_, first), (number, second) = separated_rows(tmp_path / "a.dat", "::", ("id", "name"), "latin-1")
    assert first == {"id": "1", "name": "café"}
    assert number == 2
    assert isinstance(second, DataError)
