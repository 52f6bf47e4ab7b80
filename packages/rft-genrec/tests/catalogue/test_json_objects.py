"""Objects whose keys are numbers of items."""

import itertools
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.json_objects import read_numbered, read_object


def test_values_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"1": "b", "0": "a"}')
    assert read_numbered(tmp_path / "a.json") == ("a", "b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"0": 1, "2": 2}', "without 1, but with '2'"),
        ('{"0": 1, "01": 2}', "'01'"),
        ('{"0": 1, "0": 2}', "'0' is there twice"),
        ('{"0": NaN}', "NaN"),
        ("[1]", "holds a list"),
        ('{"0": 1', "cannot be read"),
        ('{"0": ' + "[" * 100_000, "nested too deeply"),
    ],
    ids=itertools.count(),
)
def test_anything_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said):
        read_numbered(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("t.index.json", "rft-train genrec sid --overwrite --catalogue {folder} --embeddings FILE"),
        ("t.item.json", "mend t.item.json"),
    ],
)
def test_a_damaged_index_is_answered_with_the_command_that_makes_it(tmp_path: Path, name: str, do: str) -> None:
    (tmp_path / name).write_text('{"0": ["<a_1>"')
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_object(tmp_path / name)
    assert caught.value.problem.do == do.format(folder=tmp_path)
    (tmp_path / "t.emb-tfidf.npy").touch()
    with pytest.raises(DataError) as caught:
        read_object(tmp_path / name)
    assert caught.value.problem.do == do.format(folder=tmp_path).removesuffix(" --embeddings FILE")
