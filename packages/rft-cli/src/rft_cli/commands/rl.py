"""`rft-train rl`: train a policy on rewards of its own responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft_cli import end_page, plan_page, run_start
from rft_cli.compose import RlData, build_rl, make_reward, rl_data
from rft_cli.config.resolve import Resolved, resolve
from rft_cli.machine import Machine, open_machine
from rft_cli.settings import RlSettings
from rft_models.text import HfTextCodec, load_tokenizer
from rft_trainer.stopping import StopSignals


def run(argv: list[str]) -> int:
    """Resolve, plan, train."""
    train(resolve("rl", argv), ["rft-train", "rl", *argv])
    return 0


def train(
    resolved: Resolved[RlSettings], command: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """One RL run from its settings; `in_place` continues the run in that directory. Returns the run's directory."""
    settings = resolved.settings
    with StopSignals() as signals, open_machine(settings.model.device) as machine:
        codec = load_tokenizer(settings.model.pretrain)
        data = rl_data(settings, codec, machine.ranks.world_size)
        path = in_place or run_start.choose_path(
            settings.checkpoint, settings.run, resolved.recipe_name or "rl", machine
        )
        if machine.is_first:
            plan_page.show_rl(resolved, data, machine)
        started = run_start.start(resolved, command, path, machine, in_place=in_place is not None)
        _run(resolved, machine, codec, data, started, signals)
        if machine.is_first and show_end:
            summary = started.directory.read_summary()
            assert summary is not None
            end_page.show(started.directory, summary, end_page.after_training(path))
    return path


def _run(
    resolved: Resolved[RlSettings],
    machine: Machine,
    codec: HfTextCodec,
    data: RlData,
    started: run_start.Started,
    signals: StopSignals,
) -> None:
    settings, directory = resolved.settings, started.directory
    sinks = run_start.make_sinks(directory, settings.run, data.num_steps) if machine.is_first else []
    reward = make_reward(settings.reward)
    try:
        training = build_rl(
            settings,
            machine,
            directory,
            codec,
            data,
            reward,
            sinks,
            metadata=run_start.metadata(resolved, data.training.data_hash),
            resume_command=started.resume_command,
            restored=started.restored,
        )
        run_start.carry_out(training, started, resolved, sinks, signals, is_first=machine.is_first)
    finally:
        reward.close()
