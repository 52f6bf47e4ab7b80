"""Lines of text files."""

import gzip
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue import text_lines
from rft_genrec.catalogue.text_lines import read_lines


def test_a_byte_order_mark_is_passed_over_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert [*read_lines(tmp_path / "a.txt")] == ["one\r\n", "two"]
    assert [*read_lines(tmp_path / "a.gz")] == ["one\n", "two\n"]
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert [*read_lines(tmp_path / "latin", encoding="latin-1")] == ["café"]


@pytest.mark.parametrize("line", [b"nul\0\n", b"caf\xe9\n", b"x" * 70 + b"\n"])
def test_what_is_no_text_is_refused_with_its_row(tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "LONGEST_LINE", 64)
    (tmp_path / "a.txt").write_bytes(b"good\n" + line)
    with pytest.raises(DataError, match="row 2: expected") as caught:
        list(read_lines(tmp_path / "a.txt"))
    assert caught.value.problem.where == f"{tmp_path / 'a.txt'}:2"


def test_a_file_that_ends_early_or_is_absent_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"one\n" * 1000)
    (tmp_path / "torn.gz").write_bytes(whole[:-10])
    (tmp_path / "no.gz").write_bytes(b"plain")
    for name in ("torn.gz", "no.gz", "absent.txt"):
        with pytest.raises(DataError, match="cannot be read"):
            list(read_lines(tmp_path / name))
