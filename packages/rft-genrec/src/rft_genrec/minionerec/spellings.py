"""MiniOneRec's parameters as settings of `genrec sft` and `genrec rl`, beside the settings' own names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rft.config.deepspeed_file import read_deepspeed
from rft.config.errors import refused_setting
from rft.config.origins import GivenSetting
from rft.config.rules.sourced_values import SourcedValues
from rft.config.schema import Setting
from rft.config.spellings import Derived, Spellings, Translated
from rft_core.errors import OptionsError
from rft_genrec.minionerec.names import RL, SFT
from rft_genrec.minionerec.script_records import Parameter, Script

_GROUP = "minionerec"
_SWITCHES = (
    *("train_from_scratch", "add_gt", "sync_ref_model", "sample_train", "test_during_training"),
    *("group_by_length", "dapo", "gspo", "mask_all_zero", "beam_search"),
)
_NUMBERS = ("gradient_accumulation_steps", "sample")
_REWARDS = {
    "rule": "rule",
    "ranking": "rule,ranking",
    "ranking_only": "ranking",
    "semantic": "semantic",
    "sasrec": "collaborative",
}
_NO_DEVICE = ("none", "null")


@cache
def sft() -> Spellings:
    """Return MiniOneRec's names beside those of `genrec sft`."""
    return _spellings(SFT)


@cache
def rl() -> Spellings:
    """Return MiniOneRec's names beside those of `genrec rl`."""
    return _spellings(RL)


def _spellings(script: Script) -> Spellings:
    # what has its name here already, as freeze_LLM, is no other spelling
    others = [parameter for parameter in script.parameters if parameter.name.lower() != parameter.to]
    table = {parameter.name: _row(parameter) for parameter in others}

    def translate(option: GivenSetting, value: Any) -> Translated:
        parameter = script.parameter(option.name)
        special = _SPECIAL.get(option.name)
        if special is not None:
            return special(option, value, parameter)
        return _renamed(option, parameter) if parameter.to else _refused(option, parameter)

    return Spellings(table, {}, translate)


def _row(parameter: Parameter) -> Setting:
    kind: Any = bool if parameter.name in _SWITCHES else int if parameter.name in _NUMBERS else str
    return Setting(parameter.name, _GROUP, kind, None, {}, parameter.name)


def _renamed(option: GivenSetting, parameter: Parameter, *texts: str) -> Translated:
    return Translated((replace(option, name=parameter.to, texts=texts or option.texts),))


def _refused(option: GivenSetting, parameter: Parameter) -> Translated:
    shown = f"{option.written} {' '.join(option.texts)}".strip()
    return Translated(problems=(refused_setting(option, shown, parameter.refusal, parameter.do),))


def _refused_if_on(option: GivenSetting, wanted: bool, parameter: Parameter) -> Translated:
    return _refused(option, parameter) if wanted else Translated()


def _sample(option: GivenSetting, number: int, parameter: Parameter) -> Translated:
    return _renamed(option, parameter, str(max(0, number)))


def _offload_optimizer(option: GivenSetting, device: str, parameter: Parameter) -> Translated:
    if device.lower() in _NO_DEVICE:
        return Translated()
    if device.lower() != "cpu":
        why = "states go to the CPU or stay on the GPU"
        return _refused(option, replace(parameter, refusal=why, do="--adam_offload"))

    def later(given: SourcedValues) -> Derived:
        if given.values["zero_stage"]:
            return Derived()
        why = f"{option.written} {device} has no effect without a stage of ZeRO"
        names = ["adam_offload", "zero_stage"]
        return Derived(problems=(given.make_problem("genrec.idle_offload", names, why, "--zero_stage 2"),))

    return replace(_renamed(option, parameter, "true"), later=later)


def _offload_parameters(option: GivenSetting, device: str, parameter: Parameter) -> Translated:
    return Translated() if device.lower() in _NO_DEVICE else _refused(option, parameter)


def _accumulation(option: GivenSetting, number: int, parameter: Parameter) -> Translated:
    def later(given: SourcedValues) -> Derived:
        return _batch_of(given, number, option)

    return Translated(later=later)


def _batch_of(given: SourcedValues, accumulation: int, option: GivenSetting) -> Derived:
    """Return the batch of a step: micro-batch x accumulation x ranks, unless it is given too."""
    micro, batch = int(given.values["micro_train_batch_size"]), int(given.values["train_batch_size"])
    ranks = max(1, int(given.values.get("nproc") or 0), int(os.environ.get("WORLD_SIZE") or 1))
    product = micro * accumulation * ranks
    shown = f"{micro} x {accumulation} x {ranks} ranks = {product}"
    if given.origins["train_batch_size"].kind == "default":
        note = f"train_batch_size = {product}: micro_train_batch_size x {option.written} x ranks = {shown}"
        return Derived({"train_batch_size": product}, option.origin, (note,))
    if product == batch:
        return Derived()
    names = ["train_batch_size", "micro_train_batch_size"]
    why = f"{option.written} {accumulation} says another batch: {shown}"
    return Derived(problems=(given.make_problem("genrec.accumulation", names, why, f"--train_batch_size {product}"),))


def _deepspeed(option: GivenSetting, path: str, parameter: Parameter) -> Translated:
    try:
        read = read_deepspeed(Path(path))
    except OptionsError as error:
        return Translated(problems=error.problems)
    options = tuple(replace(option, name=name, texts=(text,)) for name, text in read.settings.items())
    number = read.accumulation
    later = None if number is None else (lambda given: _batch_of(given, number, option))
    return Translated(options, read.notes, later=later)


def _resume(option: GivenSetting, path: str, parameter: Parameter) -> Translated:
    if path.lower() in (*_NO_DEVICE, "", "false"):
        return Translated()
    on = replace(option, name="load_checkpoint", texts=("true",))
    return Translated((on,)) if path.lower() == "true" else Translated((on, *_renamed(option, parameter).options))


def _reward(option: GivenSetting, kind: str, parameter: Parameter) -> Translated:
    if kind in _REWARDS:
        return _renamed(option, parameter, _REWARDS[kind])
    return _refused(
        option, replace(parameter, refusal=f"it is one of {', '.join(_REWARDS)}", do="--genrec_reward rule")
    )


def _beams(option: GivenSetting, wanted: bool, parameter: Parameter) -> Translated:
    return _renamed(option, parameter, "beams" if wanted else "samples")


def _token_mean(option: GivenSetting, wanted: bool, parameter: Parameter) -> Translated:
    return _renamed(option, parameter, "token-mean") if wanted else Translated()


_SPECIAL: dict[str, Callable[[GivenSetting, Any, Parameter], Translated]] = {
    **dict.fromkeys(("train_from_scratch", "add_gt", "sync_ref_model", "sample_train"), _refused_if_on),
    **dict.fromkeys(("test_during_training", "group_by_length"), _refused_if_on),
    "sample": _sample,
    "offload_optimizer_device": _offload_optimizer,
    "offload_param_device": _offload_parameters,
    "gradient_accumulation_steps": _accumulation,
    "deepspeed_config": _deepspeed,
    "resume_from_checkpoint": _resume,
    "reward_type": _reward,
    "beam_search": _beams,
    "dapo": _token_mean,
}
"""Parameters of which more than the name is another one."""
