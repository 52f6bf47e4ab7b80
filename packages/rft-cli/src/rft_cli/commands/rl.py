"""`rft-train rl`: train a policy on rewards of its own responses."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rft_cli import end_page, plan_page, run_start
from rft_cli.async_choice import close_engines
from rft_cli.compose import build_rl
from rft_cli.compose_data import RlData, rl_data
from rft_cli.config.resolve import Resolved, resolve
from rft_cli.environment_choice import enter_environment, opened_data
from rft_cli.launching import Preflight
from rft_cli.machine import Machine, open_machine
from rft_cli.media_choice import codec_with_images
from rft_cli.reward_choice import build_reward
from rft_cli.settings import RlSettings
from rft_models.tokenization.tokenizer import HfTextCodec
from rft_trainer.loops.rl import Reinforcement
from rft_trainer.metrics.sink import Sink
from rft_trainer.records.scores import Reward
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import ComputeAdvantages


def run(argv: list[str]) -> int:
    """Resolve, plan, train."""
    train(resolve("rl", argv), ["rft-train", "rl", *argv])
    return 0


def train(
    resolved: Resolved[RlSettings], command: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """One RL run from its settings; `in_place` continues the run in that directory. Returns the run's directory."""
    with StopSignals() as signals, prepared(resolved, command, in_place=in_place) as ready:
        path = ready.started.directory.path
        run_start.carry_out(
            ready.training, ready.started, resolved, ready.sinks, signals, is_first=ready.machine.is_first
        )
        if ready.machine.is_first and show_end:
            summary = ready.started.directory.read_summary()
            assert summary is not None
            end_page.show(ready.started.directory, summary, end_page.after_training(path))
    return path


@dataclass(frozen=True, slots=True)
class Prepared:
    """An RL run that is built and has not begun: nothing was written."""

    machine: Machine
    codec: HfTextCodec
    data: RlData
    started: run_start.Started
    sinks: Sequence[Sink]
    training: Reinforcement


@contextmanager
def prepared(
    resolved: Resolved[RlSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    reward: Reward | None = None,
    compute_advantages: ComputeAdvantages | None = None,
    script: str = "",
) -> Generator[Prepared]:
    """Read, plan and build; `reward` and `compute_advantages` take the place of what the settings name.

    They are code of `script`, which alone can continue the run then.
    """
    settings = resolved.settings
    limits, debug = settings.watch, settings.run.debug
    with (
        open_machine(settings.model.device, Preflight(resolved, in_place), limits, debug=debug) as machine,
        ExitStack() as opened,
    ):
        codec = codec_with_images(settings.model, settings.images)
        environment = enter_environment(settings.conversation, codec, opened)
        data = opened_data(rl_data(settings, codec, machine.ranks.world_size), environment)
        path = in_place or run_start.choose_path(
            settings.checkpoint, settings.run, resolved.recipe_name or "rl", machine
        )
        if machine.is_first:
            plan_page.show_rl(resolved, data, machine)
        started = run_start.start(resolved, command, path, machine, in_place=in_place is not None, script=script)
        sinks = run_start.make_sinks(started.directory, settings.run, data.num_steps) if machine.is_first else []
        judge = build_reward(settings, machine, function=reward)
        try:
            training = build_rl(
                settings,
                machine,
                started.directory,
                codec,
                data,
                judge,
                sinks,
                metadata=run_start.metadata(resolved, data.training.data_hash),
                resume_command=started.resume_command,
                restored=started.restored,
                compute_advantages=compute_advantages,
                environment=environment,
            )
            opened.callback(close_engines, training)
            yield Prepared(machine, codec, data, started, sinks, training)
        finally:
            judge.close()
