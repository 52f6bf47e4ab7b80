"""Rows of an evaluation on disk while it goes on: what a kill leaves is read again, and no row is lost or doubled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import LineAppender, read_records, remove_file
from rft_core.errors import DataError, OptionsError
from rft_trainer.evaluation.evaluator import Rows

_RESPONSES_AT_ONCE = 256


@dataclass(slots=True)
class PartialRows:
    """Journal of an evaluation: a line with its manifest, then a line a prompt.

    Only the first rank reads and writes it; it gets the rows of all ranks, turn by turn.
    """

    path: Path
    manifest: Mapping[str, Any]
    """What must be equal for the rows to be of the same evaluation, as JSON."""
    prompt_ids: Sequence[str]
    num_samples: int

    @property
    def prompts_at_once(self) -> int:
        """Prompts a rank between two writes, so that a kill costs at most so many answers."""
        return max(1, _RESPONSES_AT_ONCE // self.num_samples)

    def done(self) -> dict[int, Rows]:
        """Return the rows that an earlier part of the same evaluation left; the file is begun where there are none.

        Raises:
            OptionsError: the file belongs to another evaluation.
            DataError: a line cannot be read, a row is there twice, or is of no prompt of the data.
        """
        records = read_records(self.path)
        if not records.rows and not records.num_unreadable:
            self._append({"manifest": dict(self.manifest)})
            return {}
        if records.num_unreadable:
            raise self._unsound(f"{records.num_unreadable} lines that are no JSON records")
        self._require_same(records.rows[0].get("manifest"))
        found: dict[int, Rows] = {}
        for record in records.rows[1:]:
            index, rows = record.get("index"), record.get("rows")
            known = self.prompt_ids[index : index + 1] if isinstance(index, int) and index >= 0 else ()
            if not isinstance(index, int) or list(known) != [record.get("prompt_id")]:
                raise self._unsound(f"a row of {record.get('prompt_id')}, number {index}, which the data does not have")
            if index in found:
                raise self._unsound(f"the rows of {record['prompt_id']} twice")
            if not isinstance(rows, list) or len(rows) != self.num_samples:
                raise self._unsound(f"not {self.num_samples} rows of {record['prompt_id']}")
            found[index] = rows
        return found

    def keep(self, rows: Mapping[int, Rows]) -> None:
        """Append the rows of prompts, and put them on the disk."""
        appender = LineAppender(self.path, sync_every=0)
        for index, group in rows.items():
            appender.append({"index": index, "prompt_id": self.prompt_ids[index], "rows": group})
        appender.close()

    def remove(self) -> None:
        """Remove the file, after the whole was written elsewhere."""
        if self.path.exists():
            remove_file(self.path)

    def _append(self, record: Mapping[str, Any]) -> None:
        appender = LineAppender(self.path)
        appender.append(record)
        appender.close()

    def _require_same(self, stored: object) -> None:
        if stored == self.manifest:
            return
        known: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}
        other = [name for name, value in self.manifest.items() if known.get(name) != value]
        name = other[0] if other else "the form of the file"
        raise OptionsError(
            code="eval.other_partial",
            what=f"{self.path} holds rows of another evaluation: {', '.join(other) or name} differ; {name} was "
            f"{str(known.get(name))[:80]} and is {str(self.manifest.get(name))[:80]}",
            where="--output",
            why="rows of two evaluations are not mixed; an evaluation that was killed goes on with the same settings",
            state="nothing was written",
            do=f"rm {self.path}",
        )

    def _unsound(self, what: str) -> DataError:
        return DataError(
            code="eval.partial_rows",
            what=f"{self.path} has {what}",
            where=str(self.path),
            why="every row is counted exactly once, so the rows of an earlier start are used whole or not at all",
            state="nothing was written",
            do=f"rm {self.path}, and the same command begins again",
        )


def require_each_once(
    rows: Sequence[Mapping[str, Any]], prompt_ids: Sequence[str], num_samples: int, where: str
) -> None:
    """Refuse rows in which a sample of a prompt is missing, is there twice, or is of no prompt of the data.

    Raises:
        DataError: it names the first such row.
    """
    expected = {(prompt_id, sample) for prompt_id in prompt_ids for sample in range(num_samples)}
    seen: set[tuple[str, int]] = set()
    for row in rows:
        name = (str(row.get("prompt_id")), int(row.get("sample", 0)))
        if name in seen or name not in expected:
            raise _wrong_row(name, "is there twice" if name in seen else "is not among the data", where)
        seen.add(name)
    if len(seen) < len(expected):
        first = next(
            (prompt_id, sample)
            for prompt_id in prompt_ids
            for sample in range(num_samples)
            if (prompt_id, sample) not in seen
        )
        raise _wrong_row(first, f"is missing, with {len(expected) - len(seen) - 1} others", where)


def _wrong_row(name: tuple[str, int], what: str, where: str) -> DataError:
    return DataError(
        code="eval.rows",
        what=f"{name[0]}#{name[1]} {what}",
        where=where,
        why="an evaluation has each response to each prompt exactly once",
        do="evaluate again",
    )
