"""Interactions in memory, and the sources that they come from."""

import gzip
import json
from pathlib import Path

import pytest
from interaction_rows import as_texts, table

from rft_core.errors import DataError
from rft_genrec.catalogue.records import Item
from rft_genrec.interactions.amazon import AmazonSource, amazon_title, plain_text
from rft_genrec.interactions.movielens import MovieLensSource
from rft_genrec.interactions.sources import texts_of
from rft_genrec.interactions.tables import TableSource
from rft_genrec.settings.data import ColumnSettings


def test_interactions_are_gathered_in_the_order_of_the_files() -> None:
    rows = ["ann saw 3", "bob axe 1", "ann axe 2"]
    gathered = table(*rows)
    assert gathered.counts == (2, 2, 3)
    assert as_texts(gathered) == rows
    assert as_texts(gathered.where(gathered.times_N > 1)) == ["ann saw 3", "ann axe 2"]


def test_amazon_is_read_with_its_own_keys(tmp_path: Path) -> None:
    review = {
        "reviewerID": "A1",
        "asin": "B1",
        "unixReviewTime": 9,
        "overall": 5.0,
        "reviewText": "a<br>b",
        "summary": "s",
    }
    (tmp_path / "Tools_5.json.gz").write_bytes(gzip.compress(json.dumps(review).encode()))
    metadata = [
        {"asin": "B1", "title": '"A &amp; B"', "description": ["<p>one</p>", "", "two  &lt;3"], "brand": "by\nX"},
        {"asin": "B2", "category": ["Tools", "</span>"], "categories": ["other"]},
        {"asin": "B3", "title": "T", "categories": [["Tools", "Saws"]]},
    ]
    (tmp_path / "meta.json").write_text("\n".join(map(json.dumps, metadata)))
    source = AmazonSource(tmp_path / "Tools_5.json.gz", tmp_path / "meta.json")
    assert source.name == "Tools"
    assert [*source.interactions()] == [("A1", "B1", 9)]
    assert texts_of(source, {"B3": 0, "B1": 1, "B2": 2, "B9": 3}) == [
        Item("T", categories=("Tools", "Saws")),
        Item("A & B", "one two <3", "X"),
        Item("", categories=("Tools",)),
        None,
    ]
    assert [*source.review_texts({"A1": 0}, {"B1": 4})] == [((0, 4, 9), ("ab", "s"))]
    assert [*source.review_texts({}, {"B1": 4})] == []


def test_titles_and_texts_are_cleaned_as_the_original_does() -> None:
    assert amazon_title(' "3/4&quot; bit" ') == '3/4" bit'
    assert plain_text("a <b\n>c</b> &eacute; ") == "a c é"


@pytest.mark.parametrize("form", ["dat", "csv", "100k"])
def test_the_forms_of_movielens_give_the_same(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "ml"
    folder.mkdir()
    if form == "dat":
        (folder / "ratings.dat").write_text("1::7::5::978300760\n2::7::3::978302109\n")
        (folder / "movies.dat").write_bytes("7::Léon (1994)::Crime|Drama\n".encode("latin-1"))
    elif form == "csv":
        (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,7,5.0,978300760\n2,7,3.0,978302109\n")
        (folder / "movies.csv").write_text("movieId,title,genres\n7,Léon (1994),Crime|Drama\n", encoding="utf-8")
    else:
        (folder / "u.data").write_text("1\t7\t5\t978300760\n2\t7\t3\t978302109\n")
        flags = "|".join("1" if place in (6, 8) else "0" for place in range(19))
        (folder / "u.item").write_bytes(f"7|Léon (1994)|01-Jan-1994||http://x|{flags}\n".encode("latin-1"))
    source = MovieLensSource(folder)
    assert source.name == "ml"
    assert [*source.interactions()] == [("1", "7", 978300760), ("2", "7", 978302109)]
    assert [*source.items()] == [("7", Item("Léon (1994)", categories=("Crime", "Drama")))]


def test_a_directory_without_ratings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of ratings\.dat, ratings\.csv, u\.data"):
        list(MovieLensSource(tmp_path).interactions())


def test_a_table_may_have_the_texts_of_items_itself(tmp_path: Path) -> None:
    (tmp_path / "buys.csv").write_text('who,what,at,name,cats\nann,7,2016-03-01,Saw,"tools, saws"\nbob,8,0,Axe,\n')
    (tmp_path / "items.csv").write_text("what,name,made\n7,Handsaw,X\n")
    names = ColumnSettings(
        user_column="who",
        item_column="what",
        time_column="at",
        title_column="name",
        categories_column="cats",
        brand_column="made",
    )
    source = TableSource(tmp_path / "buys.csv", None, names)
    assert source.name == "buys"
    assert [*source.interactions()] == [("ann", "7", 1456790400), ("bob", "8", 0)]
    assert [*source.items()] == [("7", Item("Saw", categories=("tools", "saws"))), ("8", Item("Axe"))]
    apart = TableSource(tmp_path / "buys.csv", tmp_path / "items.csv", names)
    assert [*apart.items()] == [("7", Item("Handsaw", brand="X"))]
