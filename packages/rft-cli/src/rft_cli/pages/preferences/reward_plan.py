"""Plan page of a reward model's training: pairs, head, arithmetic."""

from __future__ import annotations

from rft.build.lora import preview_adapters
from rft.build.models import attention_line
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft.settings import RmSettings
from rft.stages.reward_head import is_reward_model, scored_part, trained_spec
from rft.stages.reward_pairs import RewardData
from rft.stages.rm import RmInputs
from rft.stages.supervised.step_rows import StepData
from rft_cli.pages.run_plan import cut_line, early_end, notes_on, saving_line
from rft_cli.pages.run_plan_layout import strategy_line

_MOST_NAMED = 10
"""Pairs left out that are named."""
_WITHOUT_MARGIN = {"hps": "cross-entropy over (better, worse)", "logexp": "log(1 + exp(worse - better))"}


def rm_lines(resolved: Resolved[RmSettings], data: RmInputs) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of a reward model's run."""
    settings, chosen = resolved.settings, resolved.settings.training
    kind = ("pair", "pairs") if data.spec.steps is None else ("row", "rows")
    size = min(chosen.train_batch_size, len(data.pairs.units))
    return [
        ("data", [*_data_lines(settings, data), *notes_on(resolved, data.pairs.notes)]),
        ("head", [_head_line(settings, data)]),
        ("loss", [loss_line(settings)]),
        (
            "batches",
            [
                f"{len(data.pairs.units):,} {kind[1]} / {size:,} = {-(-len(data.pairs.units) // size):,} steps an "
                f"epoch, {data.pairs.num_steps:,} steps at most",
                *early_end(resolved, chosen.max_steps, data.pairs.num_steps, chosen.max_epochs),
                cut_line(
                    chosen.micro_train_batch_size,
                    chosen.max_tokens_per_micro_batch,
                    chosen.packing_samples,
                    kind=kind,
                ),
            ],
        ),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [saving_line(settings.checkpoint)]),
    ]


def rm_model_lines(resolved: Resolved[RmSettings], machine: Machine) -> list[tuple[str, list[str]]]:
    """Return the lines on the model: its kernel, and its memory. No weights are loaded."""
    settings = resolved.settings
    attention, checkpointing = attention_line(settings.model, machine.device, without_head=True)
    pretrain = settings.model.pretrain
    of_steps = settings.training.loss_type == "steps"
    part_of = scored_part(trained_spec(pretrain, settings.head, steps=of_steps), pretrain)
    adapters = preview_adapters(settings.adapter, pretrain, part_of)
    return [
        ("adapters", [*adapters, "the head is trained beside them, whole"] if adapters else []),
        ("attention", [attention]),
        ("memory", [f"gradient checkpointing {checkpointing}"] if checkpointing else []),
    ]


def loss_line(settings: RmSettings) -> str:
    """Say the loss of a pair, or of a step, as an equation."""
    chosen = settings.training
    if chosen.loss_type == "steps":
        learned = "last labelled step of each row" if chosen.train_on_last_step_only else "labelled steps of a step"
        return f"steps: -y log sigmoid(score) - (1 - y) log sigmoid(-score), mean over the {learned}"
    if chosen.loss_type != "sigmoid":
        text = _WITHOUT_MARGIN[chosen.loss_type]
    else:
        margin = (
            " - margin of the row" if settings.data.margin_key else f" - {chosen.margin:g}" if chosen.margin else ""
        )
        noticed = f" - {chosen.tie_margin:g}" if chosen.tie_margin else ""
        text = f"-log sigmoid(better - worse{margin}{noticed})"
    text += f" + {chosen.center_rewards_coefficient:g} (sum)^2" if chosen.center_rewards_coefficient else ""
    text += "; ties by Rao-Kupper" if chosen.tie_margin else ""
    return f"{chosen.loss_type}: {text}, mean over the pairs of a step"


def _head_line(settings: RmSettings, data: RmInputs) -> str:
    spec = data.spec
    begins = "trained on from the model's directory" if is_reward_model(settings.model.pretrain) else "new"
    layer = f"layer {spec.layer}" if spec.layer else "the last layer"
    scale = ", scaled by a learned factor while training" if spec.scale_for_train else ""
    if spec.steps is not None:
        where = f"the state of {layer} at the end of each step ({spec.steps.separator!r} behind it)"
        return (
            f"{spec.heads[0]} on {where}, {begins}; a response is rewarded with the {spec.steps.reduction} of its steps"
        )
    return f"{', '.join(spec.heads)} on the {spec.pooling} state of {layer}, {begins}{scale}"


def _source_lines(pairs: RewardData | StepData, noun: str) -> list[str]:
    loaded = pairs.loaded
    if loaded is None:
        return pairs.stored.lines() if pairs.stored else []
    lines = [
        f"source {spec.name}: {sum(prompt.source == spec.name for prompt in loaded.prompts):,} {noun} "
        f"from {spec.place}" + ("" if spec.probability is None else f", drawn with probability {spec.probability:g}")
        for spec in loaded.specs
    ]
    return lines + [f"skipped {error.problem.where}: {error.problem.what}" for error in loaded.skipped.problems]


def _data_lines(settings: RmSettings, data: RmInputs) -> list[str]:
    pairs = data.pairs
    noun, texts = ("pairs", "text") if data.spec.steps is None else ("rows", "row")
    lines = _source_lines(pairs, noun)
    # that of a store is known without reading it
    longest = (
        pairs.stored.stored.longest
        if pairs.stored
        else max(sample.num_tokens for unit in pairs.units for sample in unit)
    )
    lines.append(f"{len(pairs.units):,} {noun} to train on (longest {texts} {longest} tokens)")
    lines += pairs.label_lines
    if pairs.left_out and not pairs.stored:
        named = ", ".join(f"{name} ({length})" for name, length in pairs.left_out[:_MOST_NAMED])
        more = len(pairs.left_out) - _MOST_NAMED
        lines.append(f"left out, longer than {pairs.limit} tokens: {named}{f' and {more} more' if more > 0 else ''}")
    kept_out = settings.data.held_out_rows and not settings.data.eval_data
    origin = (
        f", kept out of the training {noun} by seed {settings.run.seed}, no prompt on both sides" if kept_out else ""
    )
    held_out = len(pairs.held_out) // 2 if data.spec.steps is None else len(pairs.held_out)
    return [*lines, f"held out: {held_out:,} {noun}{origin}"]
