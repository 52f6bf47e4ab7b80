"""Settings of `pretrain` that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.training import training_problems
from rft_core.errors import Problem
from rft_dist.settings import AdamSettings
from rft_models.new_decoders.sizes import decoder_refusals
from rft_models.settings import DecoderSettings, PretrainModelSettings
from rft_trainer.settings.pretraining import PretrainTrainingSettings

_OF_NEW_MODELS: Mapping[str, object] = {item.name: item.default for item in fields(DecoderSettings)} | {
    "tokenizer": PretrainModelSettings.tokenizer,
    "tokenizer_size": PretrainModelSettings.tokenizer_size,
    "depth": PretrainTrainingSettings.depth,
}
"""Settings that a model which exists has already, with their defaults."""
_IN_TOKENS: Mapping[str, Mapping[str, object]] = {
    "lr_warmup_tokens": {
        "lr_warmup_steps": AdamSettings.lr_warmup_steps,
        "lr_warmup_ratio": AdamSettings.lr_warmup_ratio,
    },
    "lr_decay_tokens": {"lr_decay_ratio": AdamSettings.lr_decay_ratio},
}
"""Lengths in tokens, and the settings that say the same in steps or shares, with their defaults."""


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of pre-training."""
    yield from _data(given.values, given.make_problem)
    yield from _decoder(given)
    yield from _terms(given.values, given.make_problem)
    yield from _memory(given.values, given.make_problem)
    yield from _length(given)
    yield from training_problems(given)


def _data(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("patience", "target_loss", "keep_best"):
        if values[name] and not values["eval_data"] and not values["held_out_share"]:
            why = f"{name} depends on the held-out loss, and nothing is held out"
            yield make_problem("pretrain.no_held_out", [name, "held_out_share"], why, "--held_out_share 0.1")


def _decoder(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    if values["pretrain"]:
        # the file of a run repeats defaults
        named = [name for name, default in _OF_NEW_MODELS.items() if values[name] != default]
        if named:
            why = "the shape and the tokenizer are those of the model that pretrain names"
            yield given.make_problem("pretrain.has_model", [*named, "pretrain"], why, f"leave {', '.join(named)} out")
        return
    chosen = DecoderSettings(**{name: values[name] for name in (item.name for item in fields(DecoderSettings))})
    for refusal in decoder_refusals(chosen):
        yield given.make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)
    for name in ("lora_rank", "freeze_prefix"):
        if values[name]:
            why = "a new decoder has random weights, and what is not trained stays so"
            yield given.make_problem("pretrain.frozen", [name, "pretrain"], why, f"leave {name} out")
    if values["max_len"] and values["max_len"] > values["max_seq_len"]:
        why = "a window has no more tokens than the decoder can place"
        names = ["max_len", "max_seq_len"]
        yield given.make_problem("pretrain.window", names, why, f"--max_seq_len {values['max_len']}")


def _terms(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["z_loss_coef"] and values["tp_size"] > 1:
        why = f"z_loss_coef needs the whole output matrix, and with tp_size {values['tp_size']} no rank has it"
        yield make_problem("pretrain.z_loss_tp", ["z_loss_coef", "tp_size"], why, "--tp_size 1")
    if values["z_loss_coef"] and values["aux_loss_coef"]:
        why = "z_loss_coef has a forward of its own, without the loss of the routers"
        yield make_problem("pretrain.z_loss_moe", ["z_loss_coef", "aux_loss_coef"], why, "--z_loss_coef 0")


def _memory(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["memory_limit_gb"] and values["fit_memory"] == "off":
        why = "a limit is kept by choosing settings that need less, and nothing is chosen"
        yield make_problem("pretrain.unused_limit", ["memory_limit_gb", "fit_memory"], why, "--fit_memory auto")


def _length(given: SourcedValues) -> Iterator[Problem]:
    default = PretrainTrainingSettings.train_batch_size
    if given.values["train_batch_tokens"] and given.values["train_batch_size"] != default:
        names = ["train_batch_tokens", "train_batch_size"]
        why = "both say how much a step trains on"
        yield given.make_problem("pretrain.two_batches", names, why, "leave train_batch_size out")
    for in_tokens, others in _IN_TOKENS.items():
        twice = [name for name, default in others.items() if given.values[name] != default]
        if given.values[in_tokens] and twice:
            why = f"{in_tokens} and {' and '.join(twice)} say the same length in different units"
            do = f"leave {' and '.join(twice)} out"
            yield given.make_problem("pretrain.two_lengths", [in_tokens, *twice], why, do)


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    values, origins = given.values, given.origins
    found: list[str] = []
    if values["tokenizer_size"] != PretrainModelSettings.tokenizer_size and values["tokenizer"] != "bpe":
        found.append(
            f"tokenizer_size = {values['tokenizer_size']} ({origins['tokenizer_size']}) has no effect: the tokenizer "
            f"is {values['tokenizer']}"
        )
    interval = origins["eval_steps"]
    if (
        interval.kind != "default"
        and values["eval_steps"] > 0
        and not (values["eval_data"] or values["held_out_share"])
    ):
        found.append(f"eval_steps = {values['eval_steps']} ({interval}) has no effect: nothing is held out")
    return found
