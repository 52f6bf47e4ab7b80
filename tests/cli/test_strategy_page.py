"""The table of docs/strategies.md says which strategies go together as the settings do."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
WORDS = {
    "--fsdp": ["--fsdp"],
    "--zero_stage": ["--zero_stage", "2"],
    "--tp_size": ["--tp_size", "2"],
    "--sp_size": ["--sp_size", "2"],
    "--ep_size": ["--ep_size", "2"],
}


def table() -> dict[tuple[str, str], str]:
    """Each cell of the table, by the flags of its row and its column."""
    text = PAGE.read_text().partition("## Which go together\n\n")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return {(row[0], column): cell for row in rows for column, cell in zip(head[1:], row[1:], strict=True)}


def goes(*flags: str) -> bool:
    """Whether `sft`, which has all strategies, takes these flags together."""
    try:
        resolve(
            "sft", ["--pretrain", "M", "--prompt_data", "x.jsonl", *(word for flag in flags for word in WORDS[flag])]
        )
    except SettingsError:
        return False
    return True


def test_the_table_has_every_pair_of_strategies() -> None:
    assert set(table()) == set(product(WORDS, WORDS))
    assert all(cell == "" for (row, column), cell in table().items() if row == column)


@pytest.mark.parametrize("row", WORDS)
def test_a_pair_is_refused_where_the_page_says_so(row: str) -> None:
    for column in WORDS:
        if column != row:
            assert goes(row, column) == (table()[row, column] == "yes"), (row, column)
    assert re.fullmatch(r"(yes|refused)+", "".join(table()[row, column] for column in WORDS if column != row))
