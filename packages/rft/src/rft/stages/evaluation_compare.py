"""The other side of a comparison: saved rows, or a model that answers the same prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rft.hub.run_settings import local_directory
from rft.stages.evaluation_output import Row, saved_rows
from rft_core.errors import OptionsError
from rft_dist.checkpoints.locate import resolve_checkpoint


@dataclass(frozen=True, slots=True)
class ComparedWith:
    """The other side of a comparison: rows that are there, or the directory of a model."""

    name: str
    """As it was given."""
    rows: list[Row] = field(default_factory=list[Row])
    model: str = ""


def compared_with(given: str) -> ComparedWith | None:
    """Find what `--compare` names, before anything is computed; None where nothing is.

    Raises:
        OptionsError: it is neither rows nor a model.
        DataError: the rows cannot be used.
        CheckpointError: a run without a checkpoint that verifies.
    """
    if not given:
        return None
    path = Path(given).expanduser()
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        return ComparedWith(given, rows=saved_rows(path))
    if path.is_dir() and not (path / "config.json").is_file():
        return ComparedWith(given, model=str(resolve_checkpoint(path, asked_by="--compare").checkpoint.model_directory))
    named = path.suffix in (".json", ".jsonl")  # a file that is not there, and no name of the Hub
    model = given if named else local_directory(given, "--compare")
    if not (Path(model).expanduser() / "config.json").is_file():
        raise OptionsError(
            code="eval.compare",
            what=f"{given} is neither a file of rows, a run with a checkpoint, nor a model",
            where="--compare",
            why="it is FILE.json or FILE.jsonl that --output wrote, a run, a checkpoint, or a model",
            state="nothing was evaluated",
            do="--compare runs/latest, or the run that is meant",
        )
    return ComparedWith(given, model=model)
