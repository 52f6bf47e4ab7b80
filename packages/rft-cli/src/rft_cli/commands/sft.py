"""`rft-train sft`: train a model on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft_cli import end_page, plan_page, run_start
from rft_cli.compose_sft import SftData, build_sft, sft_data
from rft_cli.config.resolve import Resolved, resolve
from rft_cli.launching import Preflight
from rft_cli.machine import Machine, open_machine
from rft_cli.media_choice import codec_with_images
from rft_cli.settings import SftSettings
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTextCodec
from rft_trainer.runs.stop_signals import StopSignals


def run(argv: list[str]) -> int:
    """Resolve, plan, train."""
    train(resolve("sft", argv), ["rft-train", "sft", *argv])
    return 0


def train(
    resolved: Resolved[SftSettings], command: Sequence[str], *, in_place: Path | None = None, show_end: bool = True
) -> Path:
    """One supervised run from its settings; returns the run's directory."""
    settings = resolved.settings
    limits, debug = settings.watch, settings.run.debug
    with (
        StopSignals() as signals,
        open_machine(settings.model.device, Preflight(resolved, in_place), limits, debug=debug) as machine,
    ):
        codec = codec_with_images(settings.model, settings.images)
        data = sft_data(settings, codec, model_facts(settings.model.pretrain).max_positions)
        path = in_place or run_start.choose_path(
            settings.checkpoint, settings.run, resolved.recipe_name or "sft", machine
        )
        if machine.is_first:
            plan_page.show_sft(resolved, data, machine)
        started = run_start.start(resolved, command, path, machine, in_place=in_place is not None)
        _run(resolved, machine, codec, data, started, signals)
        if machine.is_first and show_end:
            summary = started.directory.read_summary()
            assert summary is not None
            end_page.show(started.directory, summary, _next(path))
    return path


def _run(
    resolved: Resolved[SftSettings],
    machine: Machine,
    codec: HfTextCodec,
    data: SftData,
    started: run_start.Started,
    signals: StopSignals,
) -> None:
    settings, directory = resolved.settings, started.directory
    sinks = run_start.make_sinks(directory, settings.run, data.num_steps) if machine.is_first else []
    training = build_sft(
        settings,
        machine,
        directory,
        codec,
        data,
        sinks,
        metadata=run_start.metadata(resolved, data.training.data_hash),
        resume_command=started.resume_command,
        restored=started.restored,
    )
    run_start.carry_out(training, started, resolved, sinks, signals, is_first=machine.is_first)


def _next(path: Path) -> list[tuple[str, str]]:
    model = final_model(path)
    return [
        (f"rft-train generate --pretrain {model} --prompt 'your text'", "see what it answers"),
        (f"rft-train rl --pretrain {model} --prompt_data train.jsonl", "go on with reinforcement learning from it"),
        (f"rft-train runs show {path}", "curves, settings and files of this run"),
    ]


def final_model(path: Path) -> Path:
    """The newest checkpoint's complete Hugging Face directory."""
    steps = sorted((path / "checkpoints").glob("step_*/model"))
    return steps[-1] if steps else path / "checkpoints"
