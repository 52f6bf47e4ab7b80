"""English and Chinese pages belong together: equal headings by number and level, code blocks, tables and flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture.source_tree import ROOT

CHINESE = sorted((ROOT / "docs" / "zh").glob("*.md"))
ELSEWHERE = {"contributing.md": ROOT / "CONTRIBUTING.md"}
"""English pages that stand outside of docs."""
NAMES = ["algorithms", "configuration", "contributing", "faq", "install", "quickstart", "strategies", "troubleshooting"]
CODE = re.compile(r"^```.*?^```", re.M | re.S)
INDENTED = re.compile(r"(?:\n\n)((?: {4}[^\n]*\n)+)")


def english_of(path: Path) -> Path:
    """The page that a Chinese one translates."""
    return ELSEWHERE.get(path.name, ROOT / "docs" / path.name)


def headings(text: str) -> list[int]:
    """The levels of a page's headings in their order; what stands in code is none."""
    return [len(marks) for marks in re.findall(r"^(#+) ", CODE.sub("", text), flags=re.M)]


def tables(text: str) -> list[int]:
    """The number of rows of each table."""
    found = re.findall(r"(?:^\|[^\n]*\n?)+", CODE.sub("", text), flags=re.M)
    return [len(table.strip().splitlines()) for table in found]


def flags(text: str) -> set[str]:
    """Flags that a page names, in code and in sentences."""
    return set(re.findall(r"--[a-z][a-z0-9_-]+", text))


def test_every_page_that_is_promised_in_chinese_is_there() -> None:
    assert [path.stem for path in CHINESE] == NAMES


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.stem)
def test_a_chinese_page_has_headings_code_and_tables_of_the_english_one(path: Path) -> None:
    chinese, english = path.read_text(), english_of(path).read_text()
    assert headings(chinese) == headings(english)
    assert CODE.findall(chinese) == CODE.findall(english)
    assert INDENTED.findall(chinese) == INDENTED.findall(english)
    assert tables(chinese) == tables(english)


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.stem)
def test_a_chinese_page_names_the_flags_of_the_english_one(path: Path) -> None:
    assert flags(path.read_text()) == flags(english_of(path).read_text())


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.stem)
def test_headings_of_a_chinese_page_are_chinese(path: Path) -> None:
    found = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text()), flags=re.M)
    names_alone = {"FIRE", "`num_rollouts_per_episodes = 0`"}
    assert [text for text in found if not re.search(r"[\u4e00-\u9fff]", text) and text not in names_alone] == []


def test_a_difference_is_seen() -> None:
    page = "# A\n\n## B\n\n```sh\n# no heading\nls\n```\n\n| a |\n|---|\n| b |\n"
    assert headings(page) == [1, 2]
    assert tables(page) == [3]
    assert CODE.findall(page) == ["```sh\n# no heading\nls\n```"]
    assert flags("take `--fsdp_cpu_offload` or --no-bf16") == {"--fsdp_cpu_offload", "--no-bf16"}
