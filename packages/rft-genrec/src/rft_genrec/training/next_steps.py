"""Commands that a run of a recommender proposes at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

from rft.run_lifecycle import final_model
from rft_trainer.runs.reader import read_run

Commands = list[tuple[str, str]]


def after_sft(directory: Path) -> Commands:
    """Return commands worth trying after supervised training on a catalogue."""
    model, catalogue = final_model(directory), _catalogue(directory)
    train = f"rft-train genrec rl --pretrain {model} --catalogue {catalogue}"
    return [*_of_model(model, catalogue, directory), (train, "go on with rewards of the items that it recommends")]


def after_rl(directory: Path) -> Commands:
    """Return commands worth trying after reinforcement learning on a catalogue."""
    return _of_model(final_model(directory), _catalogue(directory), directory)


def _of_model(model: Path | str, catalogue: str, directory: Path) -> Commands:
    given = f"--pretrain {model} --catalogue {catalogue}"
    return [
        (f"rft-train genrec eval {given}", "rank held-out items beside counters"),
        (f"rft-train genrec recommend {given} --serve", "recommend items over HTTP"),
        (f"rft-train report {directory}", "curves, times and samples of this run on a page"),
    ]


def _catalogue(directory: Path) -> str:
    return shlex.quote(read_run(directory).settings.get("catalogue", ("CATALOGUE", ""))[0].strip("'\""))
