"""Plan page before a run starts: data, arithmetic, machine, and settings without effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rft.build.algorithm import algorithm_record, value_head
from rft.build.images import image_counts
from rft.build.prompt_data import PreparedPrompts
from rft.build.rl_data import RlData, response_limits
from rft.config.command_record import TrainingRecord
from rft.config.commands import load
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft.settings import DpoSettings, RlSettings, SftSettings
from rft.stages.dpo import REFERENCE_FILE, loss_record
from rft.stages.preference_data import PreferenceData, ReadPreferences
from rft.stages.sft import SftData
from rft_cli.pages.run_plan_algorithm import algorithm_lines
from rft_cli.pages.run_plan_layout import engine_line, strategy_line
from rft_cli.pages.run_plan_model import model_lines
from rft_cli.pages.run_plan_ranks import preflight_lines
from rft_cli.pages.run_plan_rewards import reward_lines
from rft_core.terminal_text import visible
from rft_dist.settings import CheckpointSettings
from rft_trainer.data.sources import LoadedPrompts

_MOST_NAMED = 10
"""Rows left out that are named."""


def rl_lines(resolved: Resolved[RlSettings], data: RlData) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of an RL run."""
    settings = resolved.settings
    response, longest = response_limits(settings, data.longest_prompt)
    batch = settings.batch
    steps = f"{data.num_steps:,} steps, {data.num_updates:,} optimizer updates"
    if batch.max_steps and data.num_steps == batch.max_steps:
        steps += " (max_steps ends the run before its episodes do)"
    cut = cut_line(batch.micro_train_batch_size, batch.max_tokens_per_micro_batch, batch.packing_samples)
    return [
        (
            "data",
            [
                *(_training_lines(data.training) if data.training else []),
                *(data.stored.lines() if data.stored else []),
                f"held out: {len(data.held_out):,} prompts",
                *([data.pretraining.line(settings.pretraining.ptx_coef)] if data.pretraining else []),
                *notes_on(resolved, data.notes),
            ],
        ),
        ("preparation", [_preparation(settings, data.stored is not None)]),
        (
            "batches",
            [
                *data.plan.derivation(),
                steps,
                *early_end(resolved, batch.max_steps, data.num_steps, batch.num_episodes, setting="num_episodes"),
                cut,
            ],
        ),
        (
            "lengths",
            [
                f"longest prompt {data.longest_prompt} + longest response {response} = {longest} tokens"
                + _capped(settings)
                + _constrained(settings)
            ],
        ),
        ("algorithm", algorithm_lines(settings)),
        ("reward", reward_lines(settings)),
        ("engine", [engine_line(settings)]),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [saving_line(settings.checkpoint)]),
    ]


def _training_lines(training: PreparedPrompts) -> list[str]:
    """Return sources, lengths, images, and every row that was left out (the first ten by name)."""
    total = len(training.rendered) + len(training.left_out)
    longest = max((len(row.token_ids) for row in training.rendered), default=0)
    fit = f"{len(training.rendered):,} of {total:,} rows fit (longest prompt {longest} tokens)"
    lines = [*source_lines(training.loaded), fit, *_image_lines(training)]
    if training.left_out:
        named = ", ".join(f"{name} ({length})" for name, length in training.left_out[:_MOST_NAMED])
        more = len(training.left_out) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        lines.append(f"left out, longer than {training.limit} tokens: {named}{rest}")
    return lines


def source_lines(loaded: LoadedPrompts) -> list[str]:
    """Return the prompts of each source and its file, and the rows that were skipped."""
    lines: list[str] = []
    for spec in loaded.specs:
        num = sum(prompt.source == spec.name for prompt in loaded.prompts)
        share = "" if spec.probability is None else f", drawn with probability {spec.probability:g}"
        lines.append(f"source {spec.name}: {num:,} prompts from {spec.place}{share}")
    problems = [error.problem for error in loaded.skipped.problems]
    return lines + [f"skipped {problem.where}: {problem.what}" for problem in problems]


def _image_lines(training: PreparedPrompts) -> list[str]:
    counts = image_counts(training.rendered)
    if counts is None:
        return []
    low, high = counts.tokens_an_image
    span = f"{low:.0f} to {high:.0f}" if low < high else f"{low:.0f}"
    return [
        f"{counts.num_images:,} images in {counts.num_rows:,} of {len(training.rendered):,} rows, {span} features "
        f"(tokens) each; longest prompt with images {counts.longest_row} tokens"
    ]


def notes_on(resolved: Resolved[Any], notes: Sequence[str]) -> list[str]:
    """Return notes on the data; who wrote a recipe has decided about them."""
    return [] if resolved.recipe_name else [f"note: {note}" for note in notes]


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _capped(settings: RlSettings) -> str:
    limit = settings.sampling.max_len
    return f" (max_len = {limit} caps the sum)" if limit is not None else ""


def _constrained(settings: RlSettings) -> str:
    drawn = settings.sampling
    if not drawn.constraint:
        return ""
    share = "the tokens that may follow" if drawn.constraint_logprobs == "allowed" else "the whole vocabulary"
    return (
        f"; every response is one of the sequences of the task {drawn.constraint}; probabilities in the loss are "
        f"shares of {share}{_GROUPS[drawn.group_source]}"
    )


_GROUPS = {
    "samples": "",
    "beams": "; groups are the best beams, each counted alike: a biased estimate, as in MiniOneRec",
    "weighted_beams": "; groups are the best beams, each by its probability within the group",
}
"""How the groups of a constrained run are made, where they are not drawn."""


def _preparation(settings: RlSettings | SftSettings | DpoSettings, is_stored: bool) -> str:
    """Return how rows are rendered; those of a data store are tokens already, for which no thread is left anything."""
    data = settings.data
    how = "in the main thread"
    if is_stored:
        how = "once, into the data store"
        if data.num_workers > 0:
            how += (
                f"; num_workers = {data.num_workers} has no effect on them: "
                "--data_store_workers is the number of processes that tokenise"
            )
    elif data.num_workers < 0:
        how += ", and by threads once steps wait for them"
    elif data.num_workers:
        how = f"by {data.num_workers} threads, {data.num_workers * data.prefetch_factor} batches ahead"
    pinned = "; batches are copied to a GPU from page-locked memory" if data.dataloader_pin_memory else ""
    return f"rows are rendered {how}{pinned}"


def cut_line(
    max_sequences: int, max_tokens: int, packing: bool, *, kind: tuple[str, str] = ("sample", "sequences")
) -> str:
    """Say how a step is cut into micro-batches; `kind` is what they hold, one and many."""
    if packing:
        cap = f"{max_tokens:,} tokens" if max_tokens else f"{max_sequences:,} times the longest {kind[0]}"
        return f"micro-batches are filled up to {cap} (packing_samples); the step is the same"
    cap = f", {max_tokens:,} tokens" if max_tokens else ""
    return f"micro-batches of at most {max_sequences:,} {kind[1]}{cap}, without padding"


def early_end(
    resolved: Resolved[Any], max_steps: int, num_steps: int, epochs: int, *, setting: str = "max_epochs"
) -> list[str]:
    """Say where a run ends with its epochs, before the steps that were asked for, and how it reaches them."""
    if not 0 < num_steps < max_steps:
        return []
    noun = "episodes" if setting == "num_episodes" else "epochs"
    enough = -(-max_steps * epochs // num_steps)
    ends = f"{epochs:,} {noun if epochs > 1 else noun[:-1]} end{'' if epochs > 1 else 's'} the run before"
    return notes_on(resolved, [f"{ends} --max_steps {max_steps}; --{setting} {enough} lets it get there"])


def saving_line(chosen: CheckpointSettings) -> str:
    """Say when checkpoints are written, and which are kept."""
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
    tokens = data.num_loss_tokens
    left_out = [f"left out, too long: {len(data.left_out):,} demonstrations"] if data.left_out else []
    size = min(chosen.train_batch_size, len(data.samples))
    return [
        (
            "data",
            [
                *(_training_lines(data.training) if data.training else []),
                *(data.stored.lines() if data.stored else []),
                *left_out,
                _held_out_line(settings, data),
                *notes_on(resolved, data.notes),
            ],
        ),
        ("preparation", [_preparation(settings, data.stored is not None)]),
        (
            "batches",
            [
                f"{len(data.samples):,} demonstrations ({tokens:,} response tokens) / {size:,} = "
                f"{-(-len(data.samples) // size):,} steps an epoch, {data.num_steps:,} steps at most",
                *early_end(resolved, chosen.max_steps, data.num_steps, chosen.max_epochs),
                cut_line(chosen.micro_train_batch_size, chosen.max_tokens_per_micro_batch, chosen.packing_samples),
            ],
        ),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [saving_line(settings.checkpoint)]),
    ]


def _held_out_line(settings: SftSettings, data: SftData) -> str:
    kept_out = settings.data.held_out_rows and not settings.data.eval_data
    origin = f", kept out of the training rows by seed {settings.run.seed}" if kept_out else ""
    counts = Counter(data.held_out_sets)
    sets = " (" + ", ".join(f"{name}: {count:,}" for name, count in counts.items()) + ")" if counts else ""
    return f"held out: {len(data.held_out):,} demonstrations{sets}{origin}"


def dpo_lines(resolved: Resolved[DpoSettings], data: PreferenceData) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of a run on preferences."""
    settings, chosen, training = resolved.settings, resolved.settings.training, data.training
    noun = training.noun
    tokens = training.num_loss_tokens
    size = min(chosen.train_batch_size, training.num_rows)
    held_out = data.held_out.num_rows if data.held_out else 0
    kept_out = held_out and not settings.data.eval_data
    origin = f", kept out of the training rows by seed {settings.run.seed}" if kept_out else ""
    lines = [*_row_lines(training), f"held out: {held_out:,} {noun}{origin}"]
    lines += [f"held out, {line}" for line in _left_out(data.held_out)] if data.held_out and not kept_out else []
    return [
        ("data", [*lines, *notes_on(resolved, data.notes)]),
        ("preparation", [_preparation(settings, training.stored is not None)]),
        (
            "batches",
            [
                f"{training.num_rows:,} {noun} ({tokens:,} response tokens) / {size:,} = "
                f"{-(-training.num_rows // size):,} steps an epoch, {data.num_steps:,} steps at most",
                *early_end(resolved, chosen.max_steps, data.num_steps, chosen.max_epochs),
                cut_line(
                    chosen.micro_train_batch_size,
                    chosen.max_tokens_per_micro_batch,
                    chosen.packing_samples,
                    kind=("sample", noun),
                ),
            ],
        ),
        ("loss", _loss_lines(settings)),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [saving_line(settings.checkpoint)]),
    ]


def _row_lines(training: ReadPreferences) -> list[str]:
    """Return sources, lengths and every row that was left out (the first ten by name)."""
    loaded = training.loaded
    if loaded is None:
        return training.stored.lines() if training.stored else []
    lines: list[str] = []
    for spec in loaded.specs:
        number = sum(prompt.source == spec.name for prompt in loaded.prompts)
        share = "" if spec.probability is None else f", drawn with probability {spec.probability:g}"
        lines.append(f"source {spec.name}: {number:,} rows from {spec.place}{share}")
    lines += [f"skipped {error.problem.where}: {error.problem.what}" for error in loaded.skipped.problems]
    longest = max(sample.num_tokens for sample in training.samples)
    lines.append(f"longest prompt with a response: {longest} tokens")
    return lines + _left_out(training)


def _left_out(read: ReadPreferences) -> list[str]:
    lines: list[str] = []
    if read.left_out:
        lines.append(f"left out, too long: {_named([f'{name} ({length})' for name, length in read.left_out])}")
    if read.loaded is not None and read.loaded.equal:
        lines.append(f"left out, both responses equal: {_named(read.loaded.equal)}")
    return lines


def _named(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _loss_lines(settings: DpoSettings) -> list[str]:
    """Return the loss with its numbers, and where its reference comes from."""
    config = loss_record(settings.loss)
    terms = [
        f"{'' if weight == 1 else f'{weight:g} x '}{part.loss_type}, beta {part.strength:g}"
        for weight, part in config.parts
    ]
    terms += ["margin of the row"] if settings.data.margin_key else []
    terms += [f"label smoothing {config.smoothing:g}"] if config.smoothing else []
    terms += [f"divergence {config.f_divergence}"] if config.f_divergence != "reverse_kl" else []
    terms += [f"gamma {config.simpo_gamma:g}"] if config.loss_type == "simpo" else []
    terms += [f"likelihood x {config.cpo_alpha:g}"] if config.loss_type == "cpo" else []
    terms += [f"excess tokens x {settings.loss.ld_alpha:g}"] if settings.loss.ld_alpha < 1 else []
    terms += ["pairs weighted by the policy"] if config.use_weighting else []
    terms += [f"+ {config.rpo_alpha:g} x likelihood of the chosen response"] if config.rpo_alpha else []
    if not config.needs_reference:
        return [", ".join(terms), "no reference: nothing is computed before the first step"]
    if settings.loss.reference_pretrain:
        start = settings.loss.reference_pretrain
        return [", ".join(terms), f"reference: {start}, asked once; its log-probs are kept in {REFERENCE_FILE}"]
    start = "the model without its adapters" if settings.adapter.lora_rank else "the model as the run begins"
    return [", ".join(terms), f"reference: {start}, asked once; its log-probs are kept in {REFERENCE_FILE}"]


def rl_model_lines(resolved: Resolved[RlSettings], machine: Machine) -> list[tuple[str, list[str]]]:
    """Return the lines on the models of an RL run: the policy, and the reference where the algorithm needs one."""
    settings = resolved.settings
    return model_lines(
        settings.model,
        machine,
        settings.adapter,
        settings.optimizer,
        needs_reference=algorithm_record(settings).needs_reference,
        value_head=value_head(settings),
    )


def trained_model_lines(resolved: Resolved[Any], machine: Machine) -> list[tuple[str, list[str]]]:
    """Return the lines on a model that is trained without another beside it."""
    settings = resolved.settings
    return model_lines(settings.model, machine, settings.adapter, settings.optimizer)


def show(training: TrainingRecord, resolved: Resolved[Any], data: Any, machine: Machine) -> None:
    """Print the plan of a run of a command that trains."""
    groups = [*load(training.plan_lines)(resolved, data), *load(training.models)(resolved, machine)]
    for title, lines in groups:
        for number, line in enumerate(lines):
            print(visible(f"{title if number == 0 else '':<12} {line}"))
    print(f"{'machine':<12} {machine.describe()}")
    for line in preflight_lines(machine.preflight) if machine.preflight else ():
        print(f"{'ranks':<12} {line}")
    for name, value, effect in machine.environment():
        print(visible(f"{'environment':<12} {name}={value}: {effect}"))
    for note in [*resolved.notes, *_without_effect_on(machine, resolved)]:
        print(visible(f"{'note':<12} {note}"))
    print(flush=True)


def _without_effect_on(machine: Machine, resolved: Resolved[Any]) -> list[str]:
    """Return a note for each setting that was asked for and has no effect on this device."""
    asked = resolved.settings.data.dataloader_pin_memory and machine.device == "cpu"
    where = resolved.origins["dataloader_pin_memory"]
    return [f"dataloader_pin_memory = true ({where}) has no effect: the device is cpu"] if asked else []
