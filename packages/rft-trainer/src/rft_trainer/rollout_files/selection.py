"""Selection of a run's readable rollouts: rows by what they hold, and groups of the answers to one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.runs.reader import is_number, read_run, rows

Row = dict[str, Any]
Order = Literal["step", "reward", "spread", "length"]
ORDERS: tuple[str, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Conditions on a row; one that is None or empty holds of every row."""

    step: int | None = None
    """Of the training; None: of every step whose rollouts were kept."""
    prompt_id: str = ""
    status: str = ""
    finish_reason: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    contains: str = ""
    """A text in the response."""

    def takes(self, row: Row) -> bool:
        """Return whether a row holds all of it; one without a reward has none that is in a range."""
        reward = row.get("reward")
        ranged = self.reward_min is not None or self.reward_max is not None
        return (
            self.prompt_id in ("", str(row.get("prompt_id")))
            and self.status in ("", str(row.get("status")))
            and self.finish_reason in ("", str(row.get("finish_reason")))
            and self.contains in str(row.get("response"))
            and (not ranged or (is_number(reward) and _within(reward, self.reward_min, self.reward_max)))
        )


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The answers to one prompt in one step, in the order of their samples."""

    step: int
    prompt_id: str
    rows: list[Row]

    @property
    def scored(self) -> list[Row]:
        """The answers that have a reward, the best first; of equal ones the shorter first."""
        found = [row for row in self.rows if is_number(row.get("reward"))]
        return sorted(found, key=lambda row: (-row["reward"], _length(row), row.get("sample", 0)))

    @property
    def mean(self) -> float | None:
        """The mean reward; None without any."""
        return fmean(row["reward"] for row in self.scored) if self.scored else None

    @property
    def reward_range(self) -> float:
        """The best reward less the worst; 0 without any."""
        return self.scored[0]["reward"] - self.scored[-1]["reward"] if self.scored else 0.0


def read_groups(run: Path, chosen: RowFilter, order: Order = "step") -> list[AnswerGroup]:
    """Return the groups of a run that have a row as `chosen` says, with those rows alone.

    Args:
        run: directory of the run.
        chosen: what is asked of a row.
        order: step; reward, the highest mean first; spread or length, the greatest first.

    Raises:
        DataError: the run kept no rollouts, or none of this step.
        OptionsError: no prompt of this name.
    """
    kept: list[Row] = []
    for file in _files(run, chosen.step):
        kept += [{**row, "step": int(file.stem.removeprefix("step_"))} for row in rows(file)]
    return _grouped(kept, chosen, order)


def group_rows(answers: Iterable[Mapping[str, Any]], chosen: RowFilter, order: Order = "step") -> list[AnswerGroup]:
    """Return the groups of answers that are of no training, as an evaluation writes them: their step is 0.

    Args:
        answers: rows of one model's answers, each with prompt_id.
        chosen: what is asked of a row; its step is not looked at.
        order: as in `read_groups`; by step, the groups keep the order of the rows.

    Raises:
        OptionsError: no prompt of this name.
    """
    return _grouped([{**row, "step": 0} for row in answers], chosen, order)


def _grouped(kept: Sequence[Row], chosen: RowFilter, order: Order) -> list[AnswerGroup]:
    if chosen.prompt_id:
        _require_prompt(chosen.prompt_id, kept)
    groups: dict[tuple[int, str], AnswerGroup] = {}
    for row in filter(chosen.takes, kept):
        key = (row["step"], str(row.get("prompt_id", row.get("prompt"))))
        groups.setdefault(key, AnswerGroup(*key, [])).rows.append(row)
    return sorted(groups.values(), key=_KEYS[order])


_KEYS: dict[Order, Callable[[AnswerGroup], Any]] = {
    "step": lambda group: group.step,
    "reward": lambda group: float("inf") if group.mean is None else -group.mean,
    "spread": lambda group: -group.reward_range,
    "length": lambda group: -max(map(_length, group.rows)),
}


def _within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)


def _length(row: Row) -> float:
    number = row.get("num_tokens")
    return float(number) if is_number(number) else float(len(str(row.get("response"))))


def _files(run: Path, step: int | None) -> list[Path]:
    files = {int(file.stem.removeprefix("step_")): file for file in read_run(run).rollout_files}
    if not files:
        raise DataError(
            code="rollouts.none_kept",
            what=f"{run} has no rollouts",
            where=str(run / "rollouts"),
            why="a run keeps those of its first step and of each tenth, unless --no_save_trajectories; one that trains "
            "on demonstrations has none",
            do=f"rft-train runs show {run}",
        )
    if step is None:
        return list(files.values())
    if step in files:
        return [files[step]]
    nearest = min(files, key=lambda other: abs(other - step))
    raise DataError(
        code="rollouts.no_such_step",
        what=f"the rollouts of step {step} were not kept",
        where=str(run / "rollouts"),
        why=f"there are those of the steps {_shown(sorted(files))}",
        do=f"--step {nearest}",
    )


def _shown(steps: Sequence[int], most: int = 12) -> str:
    more = f" and {len(steps) - most} further ones" if len(steps) > most else ""
    return ", ".join(map(str, steps[:most])) + more


def _require_prompt(name: str, kept: Sequence[Row]) -> None:
    names = list(dict.fromkeys(str(row.get("prompt_id")) for row in kept))
    if name not in names:
        near = nearest_names(name, names) or names[:3]
        raise OptionsError(
            code="rollouts.no_such_prompt",
            what=f"no kept answer is to a prompt called {name}",
            where="--prompt",
            why=f"nearest: {', '.join(near)}",
            do=f"--prompt {near[0]}",
        )
