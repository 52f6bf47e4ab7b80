"""Runs of `rft-train rm` on rows that a test makes: their files and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.setup import TinyTask

RECIPE = "recipe: {command: rm}\ntrain_batch_size: 10\nmicro_train_batch_size: 4\n"


def write_rows(folder: Path, rows: Sequence[Mapping[str, object]], num_train: int) -> Path:
    """Write the first rows to train on, the others held out, and the recipe; return the folder."""
    for name, chosen in (("train", rows[:num_train]), ("held", rows[num_train:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (folder / "rm.yaml").write_text(RECIPE)
    return folder


def rm_words(task: TinyTask, folder: Path, run: Path, *more: str) -> list[str]:
    """The command line of a run on the rows of `folder`; `more` are further flags."""
    given = ["rm", "--config", str(folder / "rm.yaml"), "--pretrain", str(task.model)]
    given += ["--prompt_data", str(folder / "train.jsonl"), "--eval_data", str(folder / "held.jsonl")]
    return [*given, "--save_path", str(run), *more]
