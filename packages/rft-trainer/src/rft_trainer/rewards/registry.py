"""Registry of the reward functions by name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.installed_tasks.discovery import entry_text, find_task, task_names
from rft_trainer.records.scores import Reward
from rft_trainer.rewards.in_process import IN_PROCESS
from rft_trainer.rewards.rules.table import RuleContext, find_rule, rule_names
from rft_trainer.rewards.user_function import FileReward
from rft_trainer.settings.rewards import RewardSettings
from rft_trainer.workers.limits import ProcessLimits

_DEFAULTS = RewardSettings()


def reward_names() -> tuple[str, ...]:
    """Return the names of the rewards that need no file."""
    return rule_names()


def part_names(name: str) -> tuple[str, ...]:
    """Return what `--reward_weights` may name of a reward that needs no file; nothing of another."""
    rule = find_rule(name)
    return rule.parts if rule is not None else ()


def reward_by_name(
    name: str,
    *,
    num_workers: int = 1,
    timeout: float = 10.0,
    limits: ProcessLimits | None = None,
    columns: Mapping[str, str] | None = None,
    log: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Reward:
    """Build the reward called `name`, that of an installed task, or a function given as `path/to/file.py:function`.

    Args:
        name: one of `reward_names()`, a task of an installed package, or file.py:function or package.module:function
            (the last colon separates the two).
        num_workers: scoring processes, for the rewards that use any.
        timeout: seconds that one response may take; beyond it the response has no reward.
        limits: of the processes of a function in a file.
        columns: those of the data, each with a row that lacks it, or "".
        log: file for what such a function prints.
        options: settings of a rule by name; those that are not there have their defaults.

    Raises:
        PreflightError: this machine has no sandbox, for the reward that needs one.
        OptionsError: no such name, file or function, or a function that cannot be called.
        DataError: the file raises while it is imported.
    """
    if (rule := find_rule(name)) is not None:
        given = {setting: getattr(_DEFAULTS, setting) for setting in rule.settings} | dict(options or {})
        return rule.build(RuleContext(num_workers, timeout, given, limits, log))
    if name.startswith(IN_PROCESS):
        raise _of_a_script(name)
    make = partial(FileReward, num_workers=num_workers, timeout=timeout, limits=limits, columns=columns, log=log)
    path, colon, function = name.rpartition(":")
    if colon and path and function:
        return make(path, function, kind="module" if is_module(path) else "file")
    if name in task_names():
        return _of_a_package(name, make)
    raise _unknown(name)


def is_module(place: str) -> bool:
    """Return whether the place of a function is the dotted name of a module, and not the path of a file."""
    names = place.split(".")
    return all(map(str.isidentifier, names)) and names[-1] != "py" and not Path(place).exists()


def _of_a_package(name: str, make: Callable[..., Reward]) -> Reward:
    """Build the reward of an installed task, which scores in processes as that of a file does."""
    module, _, function = find_task(name, flag="--reward", part="reward").reward.partition(":")
    try:
        return make(module, function, kind="installed")
    except (OptionsError, DataError) as error:
        where = f"{entry_text(name)} ({error.problem.where})"
        raise type(error).of(replace(error.problem, where=where)) from error


def _of_a_script(name: str) -> OptionsError:
    return OptionsError(
        code="reward.in_process",
        what=f"the reward {name.removeprefix(IN_PROCESS)} was a function of the script that started the run",
        where="--reward",
        why="a command cannot call a function of another program, so the reward has to be named",
        state="nothing was started",
        do="--reward file.py:function",
    )


def _functions_of(file: Path) -> list[str]:
    """Return the public functions of a file without running it; none where it cannot be read."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _unknown(name: str) -> OptionsError:
    names = [*rule_names(), *task_names()]
    nearest = nearest_names(name, names, count=1)
    remedy = nearest[0] if nearest else "with one of these names"
    if name.endswith(".py"):
        remedy = f"{name}:{(_functions_of(Path(name)) or ['reward_fn'])[-1]}"
    return OptionsError(
        code="reward.unknown",
        what=f"no reward is named {name!r}; there are {', '.join(names)}, and file.py:function",
        where="--reward",
        why="a reward is one of these names or a function of your own",
        state="nothing was started",
        do=f"--reward {remedy}",
    )
