"""Continuation of a run from Python, in the directory in which it was started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.config import yaml_file
from rft.config.commands import DPO, PRETRAIN, RL, RM, SFT
from rft.config.origins import KEYWORD, GivenSetting
from rft.identity.continuation import FINISHED, twice_as_long
from rft.identity.storage import CONFIG, read_record, restore_config
from rft.library.callbacks import Callback
from rft.library.given_rewards import ChosenReward, GivenReward, chosen_reward
from rft.library.keyword_settings import resolved
from rft.library.run import Run
from rft.library.training_calls import script_words, train
from rft_core.errors import CheckpointError, OptionsError
from rft_trainer.rewards.in_process import IN_PROCESS
from rft_trainer.runs.reader import as_object, read_text


def resumed(
    run: Run,
    settings: Mapping[str, object],
    reward: GivenReward | None,
    callbacks: Sequence[Callback],
    *,
    panel: bool | None,
) -> Run:
    """Continue `run`; see `Run.resume`."""
    path = run.path.resolve()
    recorded = read_record(path)
    if recorded is not None:
        restore_config(path, recorded)
    command = _command_of(path)
    chosen = chosen_reward(reward)
    own = [GivenSetting("save_path", "save_path", (str(path),), KEYWORD)]
    own += [GivenSetting("reward", "reward", (chosen.setting,), KEYWORD)] if chosen.setting else []
    # paths in the settings are relative to the directory in which the run was started
    began_in = _stored_object(path / "env.json").get("working_directory")
    place = chdir(began_in) if isinstance(began_in, str) and Path(began_in).is_dir() else nullcontext()
    with place:
        prepared = resolved(command, settings, path, own)
        stored: Any = prepared.values.get("reward", "")
        if str(stored).startswith(IN_PROCESS) and chosen.function is None:
            raise _no_function(path, str(stored).removeprefix(IN_PROCESS))
        script = " ".join(script_words()) if chosen.function is not None else ""
        words = script_words() if script else ["rft-train", "resume", str(path)]
        try:
            return train(prepared, words, callbacks=callbacks, panel=panel, chosen=chosen, script=script, in_place=path)
        except CheckpointError as error:
            if error.problem.code == FINISHED:
                do = _longer(path, chosen, twice_as_long(prepared.values))
                error.reword(lambda problem: replace(problem, why=problem.why.replace("--", ""), do=do))
            raise


def _longer(path: Path, chosen: ChosenReward, limits: Sequence[str]) -> str:
    """Return the call that trains as long again; of a run that its loss ended, what reads its numbers."""
    if not limits:
        return f"rft.Run({str(path)!r}).metrics"
    given = [] if chosen.function is None else [_reward_argument(chosen.function.name)]
    return f"rft.Run({str(path)!r}).resume({', '.join([*given, *limits])})"


def _stored_object(file: Path) -> dict[str, Any]:
    try:
        return as_object(json.loads(read_text(file)))
    except ValueError:  # cut or damaged: paths are then relative to where the program is
        return {}


def _command_of(path: Path) -> str:
    """Return the command that made the run.

    Raises:
        OptionsError: config.yaml names none that trains from Python.
    """
    command = yaml_file.read(path / CONFIG, {}).header.get("command", "")
    if command in (names := (RL.name, SFT.name, PRETRAIN.name, DPO.name, RM.name)):
        return command
    raise OptionsError(
        code="library.resume_command",
        what=f"{path / CONFIG} names the command {command!r}",
        where="Run.resume",
        why=f"runs of {', '.join(names[:-1])} and {names[-1]} are continued from Python",
        state="nothing was started",
        do=f"rft-train resume {path}",
    )


def _no_function(path: Path, name: str) -> OptionsError:
    return OptionsError(
        code="library.resume_reward",
        what=f"the reward of {path} is the function {name} of the program that started it",
        where="Run.resume",
        why="a run continues with the reward that it began with",
        state="nothing was started and nothing was changed",
        do=f"rft.Run({str(path)!r}).resume({_reward_argument(name)})",
    )


def _reward_argument(name: str) -> str:
    """Return the argument that gives a reward of this program: its functions and names, joined by "+"."""
    names = name.replace("+", ", ")
    return f"reward=[{names}]" if "+" in name else f"reward={names}"
