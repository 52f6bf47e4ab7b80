"""Plan page before a run starts: data, arithmetic, machine, and settings without effect."""

from __future__ import annotations

from typing import Any

import torch

from rft.build.algorithm import algorithm_record
from rft.build.algorithm import lines as algorithm_lines
from rft.build.async_rollouts import ahead_line
from rft.build.engines import choose_engine
from rft.build.environment import environment_line
from rft.build.rewards import reward_lines
from rft.build.rl_data import RlData, response_limits
from rft.parallel.parallelize import strategy_line
from rft.process.machine import Machine, choose_device
from rft.resolved import Resolved
from rft.settings import RlSettings, SftSettings
from rft.sft import SftData
from rft_cli.pages.run_plan_model import model_lines
from rft_dist.launch.environment import environment_report


def rl_lines(resolved: Resolved[RlSettings], data: RlData) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of an RL run."""
    settings = resolved.settings
    response, longest = response_limits(settings, data.longest_prompt)
    record = algorithm_record(settings)
    batch = settings.batch
    steps = f"{data.num_steps:,} steps, {data.num_updates:,} optimizer updates"
    if batch.max_steps and data.num_steps == batch.max_steps:
        steps += " (max_steps ends the run before its episodes do)"
    cut = _cut_line(batch.micro_train_batch_size, batch.max_tokens_per_micro_batch, batch.packing_samples)
    return [
        ("data", [*data.training.lines(), f"held out: {len(data.held_out):,} prompts"]),
        ("preparation", [_preparation(settings)]),
        ("batches", [*data.plan.derivation(), steps, cut]),
        (
            "lengths",
            [
                f"longest prompt {data.longest_prompt} + longest response {response} = {longest} tokens"
                + _capped(settings)
            ],
        ),
        ("algorithm", algorithm_lines(record, settings)),
        ("reward", _judges(settings)),
        (
            "engine",
            [_engine_line(settings)],
        ),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [_saving(settings)]),
    ]


_EIGHT_BIT_CAPABILITY = (8, 9)
"""From Ada and Hopper on, GPUs have products of 8-bit floats."""

_ENGINES = {
    "native": "in this process, with the weights being trained",
    "hf": "transformers' generate, with the weights being trained",
    "vllm": "in its own process, its copy of the weights verified after every update",
    "sglang": "in its own process, its copy of the weights verified after every update",
}


def _judges(settings: RlSettings) -> list[str]:
    talk = settings.conversation
    return [environment_line(talk)] if talk.environment else reward_lines(settings)


def _engine_line(settings: RlSettings) -> str:
    choice = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    how = _ENGINES[choice.name]
    strategy = settings.strategy
    if choice.name == "native" and (strategy.fsdp or strategy.zero_stage):
        how = "in this process, its whole copy of the weights verified after every update"
    if ahead := ahead_line(settings):
        how = f"{ahead}; their copies of the weights verified after every load"
    sleep = "gives its memory back between rollouts" if settings.engine.enable_engine_sleep else "keeps its memory"
    if settings.ahead.max_staleness:
        sleep = "never sleeps"
    elif settings.engine.enable_engine_sleep and not choice.can_sleep:
        sleep = "stays awake, because vLLM's CPU build cannot sleep"
    rows = f"at most {settings.engine.engine_max_rows} sequences at once"
    eager = "; without CUDA graphs" if settings.engine.engine_enforce_eager else ""
    return f"{choice.name} ({choice.why}): {how}; {rows}; {sleep}{eager}{_eight_bits(settings)}"


def _eight_bits(settings: RlSettings) -> str:
    """Return the hint on 8-bit rounding of the engine's matrices, where it is possible and was not asked for."""
    device = choose_device(settings.model.device, 0)
    engine = choose_engine(settings.engine, device).name
    if engine != "vllm" or device == "cpu" or settings.engine.engine_fp8:
        return ""
    if torch.cuda.get_device_capability() < _EIGHT_BIT_CAPABILITY:
        return ""
    return "; this GPU multiplies 8-bit floats: --engine_fp8 --off_policy_correction tis would decode faster"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _capped(settings: RlSettings) -> str:
    limit = settings.sampling.max_len
    return f" (max_len = {limit} caps the sum)" if limit is not None else ""


def _preparation(settings: RlSettings | SftSettings) -> str:
    data = settings.data
    how = "in the main thread"
    if data.num_workers:
        how = f"by {data.num_workers} threads, {data.num_workers * data.prefetch_factor} batches ahead"
    pinned = "; batches are copied to a GPU from page-locked memory" if data.dataloader_pin_memory else ""
    return f"rows are rendered {how}{pinned}"


def _cut_line(max_sequences: int, max_tokens: int, packing: bool) -> str:
    if packing:
        cap = f"{max_tokens:,} tokens" if max_tokens else f"{max_sequences:,} times the longest sample"
        return f"micro-batches are filled up to {cap} (packing_samples); the step is the same"
    cap = f", {max_tokens:,} tokens" if max_tokens else ""
    return f"micro-batches of at most {max_sequences:,} sequences{cap}, without padding"


def _saving(settings: RlSettings | SftSettings) -> str:
    chosen = settings.checkpoint
    rules: list[str] = []
    if chosen.save_steps > 0:
        rules.append(f"every {_counted(chosen.save_steps, 'step', 'steps')}")
    if chosen.save_interval:
        rules.append(f"every {_counted(chosen.save_interval, 'episode', 'episodes')}")
    if chosen.save_minutes:
        rules.append(f"every {chosen.save_minutes:g} minutes")
    rules.append("at the start, at the end and on SIGTERM")
    return f"{', '.join(rules)}; the newest {chosen.max_ckpt_num} are kept, within {chosen.max_ckpt_mem:,} GB"


def sft_lines(resolved: Resolved[SftSettings], data: SftData) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of a supervised run."""
    settings, chosen = resolved.settings, resolved.settings.training
    tokens = sum(sample.num_loss_tokens for sample in data.samples)
    left_out = [f"left out, too long: {len(data.left_out):,} demonstrations"] if data.left_out else []
    size = min(chosen.train_batch_size, len(data.samples))
    return [
        ("data", [*data.training.lines(), *left_out, _held_out_line(settings, data)]),
        ("preparation", [_preparation(settings)]),
        (
            "batches",
            [
                f"{len(data.samples):,} demonstrations ({tokens:,} response tokens) / {size:,} = "
                f"{-(-len(data.samples) // size):,} steps an epoch, {data.num_steps:,} steps at most",
                _cut_line(chosen.micro_train_batch_size, chosen.max_tokens_per_micro_batch, chosen.packing_samples),
            ],
        ),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [_saving(settings)]),
    ]


def _held_out_line(settings: SftSettings, data: SftData) -> str:
    kept_out = settings.data.held_out_rows and not settings.data.eval_data
    origin = f", kept out of the training rows by seed {settings.run.seed}" if kept_out else ""
    return f"held out: {len(data.held_out):,} demonstrations{origin}"


def show_rl(resolved: Resolved[RlSettings], data: RlData, machine: Machine) -> None:
    """Print the plan of an RL run."""
    settings = resolved.settings
    needs_reference = algorithm_record(settings).needs_reference
    lines = model_lines(settings.model, machine, settings.adapter, needs_reference=needs_reference)
    _show([*rl_lines(resolved, data), *lines], resolved, machine)


def show_sft(resolved: Resolved[SftSettings], data: SftData, machine: Machine) -> None:
    """Print the plan of a supervised run."""
    settings = resolved.settings
    _show([*sft_lines(resolved, data), *model_lines(settings.model, machine, settings.adapter)], resolved, machine)


def _show(groups: list[tuple[str, list[str]]], resolved: Resolved[Any], machine: Machine) -> None:
    for title, lines in groups:
        for number, line in enumerate(lines):
            print(f"{title if number == 0 else '':<12} {line}")
    print(f"{'machine':<12} {machine.describe()}")
    for line in machine.preflight:
        print(f"{'ranks':<12} {line}")
    for name, value, effect in environment_report():
        print(f"{'environment':<12} {name}={value}: {effect}")
    for note in [*resolved.notes, *_without_effect_on(machine, resolved)]:
        print(f"{'note':<12} {note}")
    print(flush=True)


def _without_effect_on(machine: Machine, resolved: Resolved[Any]) -> list[str]:
    """Return a note for each setting that was asked for and has no effect on this device."""
    asked = resolved.settings.data.dataloader_pin_memory and machine.device == "cpu"
    where = resolved.origins["dataloader_pin_memory"]
    return [f"dataloader_pin_memory = true ({where}) has no effect: the device is cpu"] if asked else []
