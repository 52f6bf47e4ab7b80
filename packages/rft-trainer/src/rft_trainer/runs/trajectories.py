"""Trajectory files: prompts, responses and rewards as JSON lines, for users who want all of them.

A run keeps some rollouts of some steps by itself (`save_trajectories`); this keeps what it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_core.durable_files import Records, encode_record, read_records, replace_text, storage_errors
from rft_core.errors import DataError
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.runs.image_entries import keep_images
from rft_trainer.runs.step_report import rollout_row
from rft_trainer.scoring.samples import flat_rollouts

NEEDED = ("prompt", "response", "reward")
"""What every row holds; groups of rollouts give more (`rft_trainer.runs.step_report.rollout_row`)."""

_FILE = re.compile(r"step_(\d{6,})\.jsonl")


class TrajectorySaver:
    """Writer of one file a step, `OUTPUT_DIR/step_000010.jsonl`, with one line a response.

    A file is on disk when `save` returns, whole or not at all; the file of a step that is saved again is replaced,
    so that a resumed run leaves no line twice. Images whose bytes stood in the data are written once, to `images/`.

    Example::

        saver = TrajectorySaver(output_dir="./trajectories")
        saver.save([{"prompt": "1+1=", "response": "2", "reward": 1.0}], step=10)
    """

    def __init__(self, output_dir: str | Path = "./trajectories") -> None:
        """Store `output_dir`, which is created with the first file."""
        self.output_dir = Path(output_dir).expanduser()

    def save(
        self, trajectories: Sequence[RolloutGroup] | Sequence[Mapping[str, Any]], *, step: int | None = None
    ) -> Path:
        """Write the trajectories of a step and return the file.

        Args:
            trajectories: groups of rollouts, or rows of your own with at least `NEEDED`; a reward of None says that
                there is none.
            step: number of the file; None = one more than the highest that is there.

        Raises:
            DataError: a row without one of `NEEDED`.
            StorageError: the disk refuses; what was there before is unchanged.
        """
        number = self._next() if step is None else step
        rows: list[dict[str, Any]] = [{"step": number, **row} for row in _rows(trajectories)]
        with storage_errors("make", self.output_dir):
            self.output_dir.mkdir(parents=True, exist_ok=True)
        prompts = [item.prompt for item in trajectories if isinstance(item, RolloutGroup)]
        # images first: rows on the disk never name a file that is not there
        rows = keep_images(rows, prompts, self.output_dir, len(rows))
        file = self._file(number)
        replace_text(file, "".join(encode_record(row) + "\n" for row in rows))
        return file

    def steps(self) -> list[int]:
        """Return the steps that were saved, in order."""
        if not self.output_dir.is_dir():
            return []
        matches = [_FILE.fullmatch(file.name) for file in self.output_dir.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def read(self, step: int) -> Records:
        """Read the rows of a step; empty where none was saved."""
        return read_records(self._file(step))

    def _file(self, step: int) -> Path:
        return self.output_dir / f"step_{step:06d}.jsonl"

    def _next(self) -> int:
        return max(self.steps(), default=0) + 1


def _rows(trajectories: Sequence[Any]) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, item in enumerate(trajectories):
        if isinstance(item, RolloutGroup):
            rows += [rollout_row(group.prompt, rollout) for group, rollout in flat_rollouts([item])]
            continue
        missing = [name for name in NEEDED if name not in item]
        if missing:
            raise DataError(
                code="trajectories.incomplete",
                what=f"trajectory {number} has no {', '.join(missing)}; it has {', '.join(sorted(item)) or 'nothing'}",
                where="TrajectorySaver.save",
                why=f"a trajectory is made of {', '.join(NEEDED)}",
                state="nothing was written",
                do=f'{{..., "{missing[0]}": ...}}',
            )
        # numbers of torch and numpy, which JSON does not take
        rows.append({name: value.tolist() if hasattr(value, "tolist") else value for name, value in item.items()})
    return rows
