"""Rankings of several ranks: each keeps a file of its own, and all together are exactly those of the samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import encode_record, read_records, replace_text
from rft_core.errors import DataError
from rft_core.exact_records import exact_bytes, exact_value
from rft_core.fault_points import declare, fault_point
from rft_dist.collectives import Collectives
from rft_genrec.evaluation.measures import require_same_ids
from rft_genrec.evaluation.rankings import Ranking

_DONE = "done.jsonl"
_KEEP = declare("rankings.keep", "before rankings of a batch are kept in the file of a rank")


@dataclass(frozen=True, slots=True)
class Parts:
    """The folder of an evaluation that is under way, which a later start goes on from.

    Every file begins with the manifest of what is evaluated; rankings of another manifest are refused.
    """

    folder: Path
    manifest: Mapping[str, Any]

    def take(self) -> list[Ranking]:
        """Return the rankings that earlier starts have made, now in one file; called by the first rank alone.

        Raises:
            DataError: a file of another evaluation.
        """
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
        found: dict[str, Ranking] = {}
        files = sorted(self.folder.glob("*.jsonl"))
        for file in files:
            found |= {ranking.sample_id: ranking for ranking in self._rankings(file)}
        replace_text(self.folder / _DONE, "".join([self._head(), *map(_line, found.values())]))
        for file in files:
            if file.name != _DONE:
                file.unlink()
        return list(found.values())

    def begin(self, rank: int, world_size: int) -> Path:
        """Begin the file of a rank."""
        file = self.folder / f"rank_{rank}_of_{world_size}.jsonl"
        file.write_text(self._head(), encoding="utf-8")
        return file

    def remove(self) -> None:
        """Delete the folder: results are written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _head(self) -> str:
        return encode_record({"manifest": dict(self.manifest)}) + "\n"

    def _rankings(self, file: Path) -> Iterable[Ranking]:
        records = list(read_records(file).rows)
        if not records:
            return  # ended before its first line was whole
        stored = records[0].get("manifest")
        if stored != json.loads(encode_record(dict(self.manifest))):
            raise self._foreign(file, stored if isinstance(stored, dict) else {})
        for record in records[1:]:
            try:
                yield Ranking.from_record(record)
            except (KeyError, TypeError, ValueError):
                continue  # a row that is damaged is ranked again

    def _foreign(self, file: Path, stored: Mapping[str, Any]) -> DataError:
        differs = [name for name, value in self.manifest.items() if stored.get(name) != value]
        return DataError(
            code="genrec.stale_part",
            what=f"{file.name} is of another evaluation: {', '.join(differs) or 'its head'} differ",
            where=str(file),
            why="rankings of another model, width or split would be counted among these",
            state="nothing was changed",
            do=f"another --output, or rm -r {self.folder}",
        )


def append(file: Path | None, rankings: Iterable[Ranking]) -> None:
    """Add rankings to the file of a rank; None keeps none."""
    if file is not None:
        fault_point(_KEEP)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(map(_line, rankings))


def merged(collectives: Collectives, own: Sequence[Ranking], expected: Sequence[str]) -> list[Ranking]:
    """Return the rankings of all ranks in the order of the samples, on every rank.

    Raises:
        DataError: a sample that is missing or foreign, or that was ranked twice.
    """
    gathered = collectives.gather_bytes(exact_bytes([ranking.as_record() for ranking in own]))
    found = [Ranking.from_record(record) for part in gathered for record in exact_value(part)]
    place = {sample_id: number for number, sample_id in enumerate(expected)}
    found.sort(key=lambda one: place.get(one.sample_id, len(place)))
    require_same_ids([one.sample_id for one in found], expected)
    return found


def _line(ranking: Ranking) -> str:
    return encode_record(ranking.as_record()) + "\n"
