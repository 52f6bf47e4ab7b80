"""Recommendations for a file of histories."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rft_core.durable_files import replace_text
from rft_core.errors import DataError
from rft_genrec.serving.history_rows import HistoryRow, answer, read_line
from rft_genrec.serving.recommendations import Recommendations


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Figures of a file."""

    num: int
    num_errors: int
    seconds: float


def recommend_file(
    shop: Recommendations, source: Path, target: Path, *, k: int, batch_size: int, skip_unknown: bool
) -> BatchResult:
    """Answer every line of a file, in its order; a line that is no history gets an error in its place.

    Raises:
        DataError: the file cannot be read.
    """
    began, lines, errors = time.perf_counter(), list[str](), 0
    for rows in _batches(source, len(shop.catalogue), batch_size, skip_unknown):
        right = [row for row in rows if not row.error]
        found = iter(shop.top([row.history for row in right], k, skip_unknown=skip_unknown) if right else [])
        answers = [answer(row, None if row.error else next(found)) for row in rows]
        errors += len(rows) - len(right)
        lines += [json.dumps(one, ensure_ascii=False) + "\n" for one in answers]
    replace_text(target, "".join(lines))
    return BatchResult(len(lines), errors, time.perf_counter() - began)


def _batches(source: Path, num_items: int, size: int, skip_unknown: bool) -> Iterator[Sequence[HistoryRow]]:
    try:
        with source.open(encoding="utf-8") as file:
            rows = (read_line(line, num_items, skip_unknown=skip_unknown) for line in file if line.strip())
            while batch := list(islice(rows, size)):
                yield batch
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            code="genrec.histories",
            what=f"{source} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}",
            where="--histories",
            why='a file of histories has one JSON object a line: {"user": "a", "history": [3, 14]}',
            do=f"ls -l {source if source.exists() else source.parent}",
        ) from error
