"""CSV files of samples."""

from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.csv_samples import COLUMNS, read_samples, write_samples
from rft_genrec.catalogue.records import Catalogue, Item, Sample, SemanticIds

CATALOGUE = Catalogue("t", (Item('Saw, 12" blade'), Item("Hammer's head\nred")))
IDS = SemanticIds((("<a_0>", "<b_1>"), ("<a_1>", "<b_0>")))
HEADING = ",".join(COLUMNS)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    samples = [Sample("test:0", "A1", (0, 1), 1), Sample("test:1", "A2", (), 0)]
    for ids in (IDS, None):
        write_samples(path, samples, CATALOGUE, ids)
        assert path.read_text().splitlines()[0] == HEADING
        assert [*read_samples(path, "test", 2, IDS)] == samples


def test_ids_of_another_index_are_refused_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    write_samples(path, [Sample("test:0", "A1", (0,), 1)], CATALOGUE, IDS)
    with pytest.raises(DataError, match="row 2, column history_item_sid") as caught:
        list(read_samples(path, "test", 2, SemanticIds((("<a_0>", "<b_2>"), ("<a_1>", "<b_0>")))))
    assert caught.value.problem.code == "genrec.index"


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("user_id,item_id\nA,1\n", "", "column history_item_id is missing"),
        ("", "", "column user_id is missing"),
        ('user_id,history_item_id,item_id\nA,"[0]",1\nA,"[0]"\n', ":3", "row 3: expected 3 cells"),
        ('user_id,history_item_id,item_id\nA,"[0]",1\n ,"[0]",1\n', ":3:1", "row 3, column user_id"),
        ('user_id,history_item_id,item_id\nA,"[0, 2]",1\n', ":2:2", "row 2, column history_item_id: .* 0 to 1"),
        ('user_id,history_item_id,item_id\nA,"[0]",-1\n', ":2:3", "row 2, column item_id"),
        ('user_id,history_item_id,item_id\nA,"[0]",1.0\n', ":2:3", "row 2, column item_id"),
        ('user_id,history_item_id,item_id\nA,"[0]",\u0661\n', ":2:3", "row 2, column item_id"),
        ('user_id,history_item_id,item_id\nA,"[0]",nan\n', ":2:3", "row 2, column item_id"),
        ('user_id,history_item_id,item_id\nA,"[0]" x,1\n', ":2", "row 2: .* quotes"),
        ('user_id,history_item_id,item_id\nA,"[0],1\n', ":2", "row 2: .* quotes"),
        ('user_id,history_item_id,item_id\nA,"[0]",1\0\n', ":2", "NUL"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    path = tmp_path / "test.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        list(read_samples(path, "test", 2))
    assert caught.value.problem.where == f"{path}{place}"


def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    path.write_bytes(b'\xef\xbb\xbfuser_id,history_item_id,item_id\r\nA,"[0, 1]",1\r\n')
    assert [*read_samples(path, "test", 2)] == [Sample("test:0", "A", (0, 1), 1)]
