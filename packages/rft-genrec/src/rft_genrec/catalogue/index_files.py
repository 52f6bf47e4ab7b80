"""Semantic IDs in files: `.index.json`, and the info file that lists ID, title and number of every item."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.durable_files import replace_text
from rft_genrec.catalogue.file_errors import quoted, refused_cell, refused_file, refused_index
from rft_genrec.catalogue.index_seal import remove_seal, write_seal
from rft_genrec.catalogue.json_objects import read_object
from rft_genrec.catalogue.records import Catalogue, SemanticIds
from rft_genrec.catalogue.text_lines import read_lines

TOKEN = re.compile(r"<([a-z]+)_(\d{1,9})>")
"""A token of an ID: the letter of its level, and its code."""
_TOKENS = "a list of tokens such as ['<a_12>', '<b_200>', '<c_7>']"
_INFO_COLUMNS = 3
_FIELD_ENDS = str.maketrans("\t\r\n", "   ")


@dataclass(frozen=True, slots=True)
class CodeUse:
    """The use of one level of the IDs."""

    letter: str
    codes: int
    """Distinct codes that occur."""
    perplexity: float
    """Number of codes that would be as mixed if all were used alike."""


def level_use(ids: SemanticIds) -> tuple[CodeUse, ...]:
    """Return, for each level, the number of codes in use and their perplexity (exp of the entropy, in nats)."""
    counts: dict[int, Counter[str]] = {}
    for tokens in ids.tokens_by_item:
        for level, token in enumerate(tokens):
            counts.setdefault(level, Counter())[token] += 1
    uses: list[CodeUse] = []
    for level in sorted(counts):
        shares = np.array([*counts[level].values()], dtype=np.float64) / counts[level].total()
        perplexity = float(np.exp(-(shares * np.log(shares)).sum()))
        uses.append(CodeUse(next(iter(counts[level])).strip("<").partition("_")[0], len(counts[level]), perplexity))
    return tuple(uses)


def read_ids(path: Path, num_items: int) -> SemanticIds:
    """Read `.index.json`: an object of lists of tokens by the numbers of the items.

    Items may share an ID; their number is `SemanticIds.collision_rate`. An ID may have one token more than the others,
    by which items that share the rest are told apart.

    Raises:
        DataError: an item has no ID, the IDs are of other items, or one is malformed; with what is wrong of which item.
    """
    rows = read_object(path)
    numbers = [str(number) for number in range(num_items)]
    absent = [number for number in numbers if number not in rows]
    if absent:
        shown = ", ".join(absent[:5])
        what = f"{len(absent)} of {num_items} items have no semantic ID: item {shown}"
        raise refused_index(path, what, "every item of the catalogue needs one")
    if len(rows) > num_items:
        known = {*numbers}
        foreign = [key for key in rows if key not in known]
        what = f"it has {len(rows)} IDs for {num_items} items: {', '.join(map(quoted, foreign[:5]))}"
        raise refused_index(path, what, "the IDs are of another catalogue")
    ids = SemanticIds(tuple(_tokens(path, number, rows[number]) for number in numbers))
    _check_levels(path, ids)
    _check_lengths(path, ids)
    return ids


def write_index(path: Path, ids: SemanticIds, catalogue: Catalogue | None = None) -> None:
    """Write the IDs as `.index.json`, with the seal of index and items where the items are given."""
    rows = {str(item): list(tokens) for item, tokens in enumerate(ids.tokens_by_item)}
    # a start that is cut short between the two leaves an index without a seal, and none that does not match
    remove_seal(path)
    replace_text(path, json.dumps(rows))
    if catalogue is not None:
        write_seal(path, catalogue)


def _tokens(path: Path, number: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(token, str) for token in value):
        raise refused_index(path, f"item {number} has {quoted(value)}", f"an ID is {_TOKENS}")
    malformed = next((token for token in value if not TOKEN.fullmatch(token)), None)
    if malformed is not None:
        raise refused_index(path, f"item {number} has the token {quoted(malformed)}", f"an ID is {_TOKENS}")
    return tuple(value)


def _check_levels(path: Path, ids: SemanticIds) -> None:
    """Refuse IDs whose tokens of one level have different letters, or those of two levels one letter."""
    letters: list[str] = []
    for item, tokens in enumerate(ids.tokens_by_item):
        for level, token in enumerate(tokens):
            letter = token[1:].partition("_")[0]
            if level == len(letters) and letter not in letters:
                letters.append(letter)
            if level >= len(letters) or letters[level] != letter:
                expected = f"<{letters[level]}_...>" if level < len(letters) else "another letter"
                what = f"item {item} has {token} as token {level + 1}, where others have {expected}"
                raise refused_index(path, what, "each level has a letter of its own")


def _check_lengths(path: Path, ids: SemanticIds) -> None:
    """Refuse IDs of lengths that no de-duplication makes: one token more is given to items that share all others."""
    lengths = Counter(map(len, ids.tokens_by_item))
    shortest = min(lengths, default=0)
    if len(lengths) <= 1:
        return
    shown = ", ".join(f"{count} of {length} tokens" for length, count in sorted(lengths.items()))
    why = "IDs have one length, or one token more for items that share all others"
    longest = max(lengths)
    prefixes = Counter(tokens[:shortest] for tokens in ids.tokens_by_item)
    for item, tokens in enumerate(ids.tokens_by_item):
        single = len(tokens) > shortest and prefixes[tokens[:shortest]] == 1
        if longest > shortest + 1 or single:
            odd = item if single else next(n for n, own in enumerate(ids.tokens_by_item) if len(own) == longest)
            raise refused_index(path, f"lengths differ ({shown}), as of item {odd}", why)


def title_of_info(title: str) -> str:
    """Return a title as one field of a line: tabs and ends of lines become spaces."""
    return title.translate(_FIELD_ENDS)


def write_info(path: Path, catalogue: Catalogue, ids: SemanticIds | None) -> None:
    """Write the info file: ID, title and number of every item, separated by tabs; the ID is empty where there is none.

    Line n is item n, which MiniOneRec's rewards and baselines rely on.
    """
    lines = [
        f"{ids.text(number) if ids else ''}\t{title_of_info(item.title)}\t{number}\n"
        for number, item in enumerate(catalogue.items)
    ]
    replace_text(path, "".join(lines))


def check_info(path: Path, catalogue: Catalogue, ids: SemanticIds | None) -> None:
    """Compare an info file with the items and the IDs: line n must be item n, with its title and its ID.

    Raises:
        DataError: a line is of another item, or of other IDs; with its number.
    """
    num_lines = 0
    for number, line in enumerate(read_lines(path)):
        num_lines += 1
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != _INFO_COLUMNS:
            raise refused_cell(path, number + 1, (0, ""), "ID, title and number, separated by tabs", line)
        tokens, title, item = fields
        if number >= len(catalogue) or item != str(number):
            expected = f"item {number}" if number < len(catalogue) else f"{len(catalogue)} lines, one an item"
            raise refused_cell(path, number + 1, (3, "item_id"), expected, item)
        own = title_of_info(catalogue.items[number].title)
        if title.split() != own.split():  # MiniOneRec's readers strip titles
            raise refused_cell(path, number + 1, (2, "title"), quoted(own), title)
        if ids is not None and tokens and tokens != ids.text(number):
            what = f"{path.name} line {number + 1} gives item {number} the ID {tokens}, the index {ids.text(number)}"
            raise refused_index(path, what, "they were made of different indexes")
    if num_lines < len(catalogue):
        raise refused_file(path, f"{num_lines} lines for {len(catalogue)} items", "one line an item, in their order")
