"""An RL run: from resolved settings to its ranks, its data, its directory, its loop, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.build.environment import ChosenEnvironment, enter_environment, opened_data
from rft.build.images import tokenizer_with_images
from rft.build.replicas import require_gpus
from rft.build.reward_parts import reward_columns
from rft.build.rewards import build_reward
from rft.build.rl_data import RlData, rl_data
from rft.front_end import SILENT, FrontEnd
from rft.hub.run_settings import with_local_models
from rft.identity.changes import Facts
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.continuation import Continuation, continuation, with_commits
from rft.identity.record import Content
from rft.parallel.frozen_policy import require_same_tokenizer
from rft.planning.start_plan import RL_START
from rft.process.launching import requested_run
from rft.process.loading import loading
from rft.process.machine import Machine, open_machine
from rft.process.rollbacks import with_rollbacks
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun, compared_facts, execute, start
from rft.settings import RlSettings
from rft.stages.rl_loop import build_rl
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.media_cache import image_digests
from rft_trainer.loops.rl import RlLoop
from rft_trainer.records.scores import Reward
from rft_trainer.runs.rollback import Rollback
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import ComputeAdvantages


def rl_contents(
    resolved: Resolved[RlSettings], data: RlData, functions: Mapping[str, object | None]
) -> dict[str, Content]:
    """Return what the rows, files and code of a run hold; `functions` are those of a script that are given."""
    chosen = resolved.settings.data
    rows = rows_content(data.data_hash, len(data.prompts), chosen.prompt_data)
    held_out = records_content(
        (
            # columns in the order of their names, which says nothing
            [p.prompt_id, p.text, p.label, *([json.dumps(p.columns, sort_keys=True)] if p.columns else [])]
            # a list of its own, so that it is no column; only where there are images
            + ([digests] if (digests := image_digests(p.media)) else [])
            for p in data.held_out
        ),
        chosen.eval_data,
    )
    more: dict[str, Content] = {}
    mixed = data.pretraining
    if mixed is not None:
        place = resolved.settings.pretraining.pretrain_data
        more["pretrain_data"] = rows_content(mixed.data_hash, len(mixed.samples), place)
    given = {name: function for name, function in functions.items() if function is not None}
    return run_contents(resolved, rows, held_out, given) | more


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """An RL run that is built and has not begun: nothing was written."""

    machine: Machine
    tokenizer: HfTokenizer
    data: RlData
    started: RunStart
    training: RlLoop


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """An RL run whose ranks have met and whose data is read: what stays when it is built again from a checkpoint."""

    at: Continuation
    resolved: Resolved[RlSettings]
    """The settings as the parts read them, with the directory of every model."""
    machine: Machine
    tokenizer: HfTokenizer
    environment: ChosenEnvironment | None
    data: RlData
    facts: Facts


Prepare = Callable[[Resolved[Any]], Resolved[Any]]


def _as_they_are(resolved: Resolved[Any]) -> Resolved[Any]:
    return resolved


@contextmanager
def _opened(
    resolved: Resolved[RlSettings],
    command: Sequence[str],
    functions: Mapping[str, object | None],
    *,
    in_place: Path | None,
    front: FrontEnd,
    prepare: Prepare = _as_they_are,
) -> Generator[OpenedRun]:
    """Join the ranks, read and plan; `functions` are those of a script."""
    # before anything is read: a setting that has changed underneath would be told as another fault
    at = with_commits(continuation(resolved, in_place))
    resolved = prepare(with_local_models(at.resolved))
    settings = resolved.settings
    with (
        open_machine(
            settings.model.device,
            requested_run(resolved, in_place),
            settings.watch,
            debug=settings.run.debug,
            command=command,
            show_error=front.show_error,
        ) as machine,
        ExitStack() as opened,
    ):
        # before data and reward: what cannot fit is told at once
        resolved = RL_START(resolved, machine)
        require_gpus(settings, machine)
        tokenizer = tokenizer_with_images(settings.model, settings.images)
        if settings.teacher.teacher_pretrain:
            require_same_tokenizer(settings.teacher.teacher_pretrain, tokenizer, "--teacher_pretrain")
        # after the environment, whose tools are part of the rendered prompts
        environment = enter_environment(settings.conversation, tokenizer, opened)
        data = opened_data(rl_data(settings, tokenizer, machine.ranks.world_size), environment)
        facts = compared_facts(at, machine, rl_contents(resolved, data, functions))
        if machine.is_first:
            front.show_plan(resolved, data, machine)
        yield OpenedRun(at, resolved, machine, tokenizer, environment, data, facts)


@contextmanager
def _built(
    run: OpenedRun,
    command: Sequence[str],
    *,
    in_place: Path | None,
    reward: Reward | None = None,
    compute_advantages: ComputeAdvantages | None = None,
    script: str = "",
    front: FrontEnd,
) -> Generator[PreparedRun]:
    """Choose the directory and the checkpoint, and build; at the end what was built is closed."""
    machine, data, settings = run.machine, run.data, run.resolved.settings
    started = start(run.at, command, machine, data.num_steps, run.facts, in_place=in_place, script=script, front=front)
    # before the model: a reward that cannot be built costs no loading of weights
    judge = build_reward(
        settings,
        machine,
        function=reward,
        columns=reward_columns(settings, data.all_prompts()),
        log=started.directory.logs_directory / f"reward-{machine.ranks.rank}.log",
    )
    try:
        with loading(run.resolved, machine):
            training = build_rl(
                settings,
                started,
                run.tokenizer,
                data,
                judge,
                compute_advantages=compute_advantages,
                environment=run.environment,
            )
        try:
            yield PreparedRun(machine, run.tokenizer, data, started, training)
        finally:
            # before the reward: rollouts that run ahead are scored until they are closed
            training.rollouts.close()
    finally:
        judge.close()


@contextmanager
def prepared(
    resolved: Resolved[RlSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    reward: Reward | None = None,
    compute_advantages: ComputeAdvantages | None = None,
    script: str = "",
    front: FrontEnd = SILENT,
) -> Generator[PreparedRun]:
    """Read, plan and build; `reward` and `compute_advantages` take the place of what the settings name.

    They are code of `script`, and only that script can continue the run then.
    """
    functions = {"reward": reward, "compute_advantages": compute_advantages}
    with (
        _opened(resolved, command, functions, in_place=in_place, front=front) as run,
        _built(
            run,
            command,
            in_place=in_place,
            reward=reward,
            compute_advantages=compute_advantages,
            script=script,
            front=front,
        ) as ready,
    ):
        yield ready


def train(
    resolved: Resolved[RlSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    reward: Reward | None = None,
    script: str = "",
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
    prepare: Prepare = _as_they_are,
) -> TrainedRun:
    """Run RL from its settings to its end; `in_place` continues the run in that directory.

    `command` is what is written into the run directory as the way to start it again. `reward` takes the place of what
    the settings name: it is code of `script`, and only that script can continue the run then. `signals` stop the run.
    `prepare` makes what the settings describe and do not name, such as rows, and returns the settings that name it.
    """
    functions = {"reward": reward}
    with (
        signals or StopSignals() as listening,
        _opened(resolved, command, functions, in_place=in_place, front=front, prepare=prepare) as run,
    ):

        def attempt(rollback: Rollback | None) -> TrainedRun:
            now, place = run, in_place
            if rollback is not None:
                now, place = replace(run, at=continuation(run.at.resolved, rollback.run)), rollback.run
            with _built(now, command, in_place=place, reward=reward, script=script, front=front) as ready:
                return execute(ready.training, ready.started, listening, rollback)

        return with_rollbacks(attempt)
