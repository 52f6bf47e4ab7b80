"""The registry of failures: every row is there, what it claims has tests that exist, its pages are its own."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from architecture.source_tree import ROOT

sys.path.insert(0, str(ROOT / "ci"))
import troubleshooting

ROWS = troubleshooting.rows()
MATRIX = troubleshooting.matrix()
MOST_MISSING = 8
"""Rows that lack something, other than a run on a GPU; the number may only fall."""
MOST_UNTRANSLATED = 3
"""Rows whose lack the Chinese page has in English; the number may only fall."""


def absent(tests: list[str]) -> list[str]:
    """The node ids that name no test."""
    found: list[str] = []
    for node in tests:
        file, _, name = node.partition("::")
        path = ROOT / file
        if not path.is_file() or f"def {name.rpartition('::')[2]}(" not in path.read_text():
            found.append(node)
    return found


def test_every_failure_of_the_guides_has_a_row() -> None:
    assert [row["id"] for row in ROWS] == [f"F{number:02d}" for number in range(1, 60)]
    firsts = [part["first"] for part in troubleshooting.texts()["parts"]]
    assert firsts == sorted(firsts)
    assert set(firsts) <= {row["id"] for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_claims_only_what_tests_show(row: dict[str, Any]) -> None:
    assert absent(row["tests"]) == []
    done = [deed for deed in troubleshooting.DEEDS if row[deed]]
    assert not done or row["tests"], f"{row['id']} claims {', '.join(done)}, and no test shows it"
    if "gpu" in row:
        assert "GPU" in row["gpu"], f"{row['id']} does not say what is to be run on a GPU"
    assert done or row["missing"], f"{row['id']} does nothing and lacks nothing"
    assert row["texts"], "nobody finds a row without a text"
    for text in (row["title"], row["cause"], row["what_happens"]):
        assert text["en"].strip()
        assert re.search(r"[\u4e00-\u9fff]", text["zh"])


def test_rows_that_lack_something_become_fewer() -> None:
    assert sum(bool(row["missing"]) for row in ROWS) <= MOST_MISSING


def test_the_top_of_the_page_counts_the_rows() -> None:
    found = troubleshooting.counts()
    assert found["rows"] == found["complete"] + found["lacking"] == len(ROWS)
    assert found["lacking"] == len(re.findall(r"^Not done: ", troubleshooting.page("en"), flags=re.M))
    assert found["gpu"] == len(re.findall(r"^Not shown on a GPU: ", troubleshooting.page("en"), flags=re.M))
    assert found["gpu_complete"] <= min(found["gpu"], found["complete"])


def test_what_rows_lack_is_translated_and_nothing_else_is() -> None:
    lacks = {row["id"]: row["missing"] for row in ROWS if row["missing"]}
    lacks |= {f"{row['id']}.gpu": troubleshooting.to_show(row) for row in ROWS if troubleshooting.to_show(row)}
    assert troubleshooting.missing_in_chinese().keys() - lacks.keys() == set()
    shown = {row["id"]: troubleshooting.missing(row, "zh") for row in ROWS if row["missing"]}
    stale = [name for name, text in shown.items() if text == lacks[name]]
    assert len(stale) <= MOST_UNTRANSLATED, stale


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row["id"])
def test_a_row_of_the_fault_matrix_has_tests_or_says_what_is_missing(row: dict[str, Any]) -> None:
    assert absent(row["tests"]) == []
    assert row["tests"] or row["missing"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_error_s_text_leads_to_its_row(language: str) -> None:
    page = troubleshooting.page(language)
    headings = re.findall(r"^### (.*)$", page, flags=re.M)
    assert len(headings) == len(ROWS)
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == set(re.findall(r'<a id="(\w+)">', page))


def test_the_pages_are_those_of_the_registry() -> None:
    stale = [path.name for path, text in troubleshooting.pages().items() if path.read_text() != text]
    assert stale == [], "run: python ci/generate_reference.py"
