"""A folder with runs, as the dashboard finds them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CONFIG = """# rft-train rl: every setting, with where its value came from
recipe:
  command: rl

# model
pretrain: model                                  # default
prompt_data: data # 1.jsonl                      # command line
actor_learning_rate: {rate}                      # command line

# saving
save_path: runs                                  # command line
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for runs."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def make_run(folder: Path) -> Callable[..., Path]:
    """Make a run of some steps, with rollouts of steps 1 and 3."""

    def make(
        name: str = "mine",
        *,
        steps: int = 3,
        rate: float = 0.001,
        summary: Mapping[str, Any] | None = None,
        answers: Sequence[Mapping[str, Any]] = (),
    ) -> Path:
        run = folder / name
        (run / "rollouts").mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG.format(rate=rate))
        (run / "command.txt").write_text("rft-train rl --actor_learning_rate 0.1 --key hf_" + "a" * 34)
        append(run, [{"step": step, "num_steps": 9, "reward/mean": step / 4, "time/train": 2.0} for step in _to(steps)])
        if summary is not None:
            (run / "summary.json").write_text(json.dumps(summary))
        for step in (1, 3) if answers else ():
            lines = "".join(json.dumps(answer) + "\n" for answer in answers)
            (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines)
        return run

    return make


def append(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a run that goes on does."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _to(steps: int) -> range:
    return range(1, steps + 1)
