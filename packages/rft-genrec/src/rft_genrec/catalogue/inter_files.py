"""Files that MiniOneRec's first stage writes: `.inter`, `.inter.json`, `.user2id`, `.item2id`, `.review.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rft_core.durable_files import replace_text
from rft_genrec.catalogue.file_errors import refused_cell
from rft_genrec.catalogue.records import Sample, SplitName
from rft_genrec.catalogue.text_lines import read_lines

HEADING = ("user_id:token", "item_id_list:token_seq", "item_id:token")
_MOST_DIGITS = 12


def read_inter(path: Path, split: SplitName, num_items: int) -> Iterator[Sample]:
    """Yield the samples of an `.inter` file: user, items of the history divided by spaces, item; divided by tabs.

    Users are numbered in these files, and are called "A" and the number, as in the CSV files.

    Raises:
        DataError: the heading or a row is something else; with its number.
    """
    for number, line in enumerate(read_lines(path)):
        cells = line.rstrip("\r\n").split("\t")
        if number == 0:
            if tuple(cells) != HEADING:
                raise refused_cell(path, 1, (0, ""), f"the heading {' TAB '.join(HEADING)}", line)
            continue
        if len(cells) != len(HEADING):
            raise refused_cell(path, number + 1, (0, ""), "3 cells divided by tabs", line)
        numbers = [_items(path, number + 1, place, cell, num_items) for place, cell in enumerate(cells)]
        if len(numbers[0]) != 1 or len(numbers[2]) != 1:
            place = 0 if len(numbers[0]) != 1 else 2
            raise refused_cell(path, number + 1, (place + 1, HEADING[place]), "one number", cells[place])
        yield Sample(f"{split}:{number - 1}", f"A{numbers[0][0]}", numbers[1], numbers[2][0])


def _items(path: Path, row: int, place: int, cell: str, num_items: int) -> tuple[int, ...]:
    words = cell.split()
    if not all(word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS for word in words):
        raise refused_cell(path, row, (place + 1, HEADING[place]), "numbers divided by spaces", cell)
    numbers = tuple(map(int, words))
    if place > 0 and any(number >= num_items for number in numbers):
        raise refused_cell(path, row, (place + 1, HEADING[place]), f"items from 0 to {num_items - 1}", cell)
    return numbers


def write_inter(path: Path, samples: Iterable[Sample]) -> None:
    """Write an `.inter` file; the users are "A" and a number."""
    rows = [
        f"{sample.user.removeprefix('A')}\t{' '.join(map(str, sample.history))}\t{sample.target}\n"
        for sample in samples
    ]
    replace_text(path, "\t".join(HEADING) + "\n" + "".join(rows))


def write_sequences(path: Path, sequences: Sequence[Sequence[int]]) -> None:
    """Write `.inter.json`: the items of every user in the order of time, by the number of the user."""
    replace_text(path, json.dumps({str(user): list(items) for user, items in enumerate(sequences)}))


def write_numbers(path: Path, names: Sequence[str]) -> None:
    """Write `.user2id` or `.item2id`: the name in the source and the number, divided by a tab."""
    replace_text(path, "".join(f"{name}\t{number}\n" for number, name in enumerate(names)))


def write_reviews(path: Path, reviews: Mapping[tuple[int, int, int], tuple[str, str]]) -> None:
    """Write `.review.json`: text and summary by (user, item, time)."""
    rows = {str(key): {"review": review, "summary": summary} for key, (review, summary) in reviews.items()}
    replace_text(path, json.dumps(rows, ensure_ascii=False))
