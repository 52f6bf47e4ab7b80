"""Settings of the pre-trainer's guide as settings of `rft-train pretrain`: the spellings, and what each value means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from rft.config.errors import refused_setting
from rft.config.origins import GivenSetting
from rft.config.rules.sourced_values import SourcedValues
from rft.config.schema import Setting, schema
from rft.config.spellings import Derived, Spellings, Translated
from rft.config.values import as_text
from rft_cli.pretrainer.fields import COMMAND, ENVIRONMENT, FIELDS, NO_COMPILE, GuideField

HELD_OUT_SHARE = 0.1
"""Share of the text that `training.run_validation` holds out where nothing else says what is: nanoGPT's."""
TASK = Setting("task", "command", str, None, {})
"""The guide's `--task`; its program had one command for all of them."""
_TASKS = {
    "stream_lm": "rft-train pretrain --prompt_data ORG/NAME",
    "sft": "rft-train sft",
    "dpo": "rft-train dpo",
    "reward": "rft-train rm",
    "ppo": "rft-train rl --advantage_estimator gae",
    "regression": "rft-train pretrain",
}
_OWN_TASK = "lm"
_WARMUPS = ("lr_warmup_ratio", "lr_warmup_steps")
_NO_TASK = "it has no command here: this project trains language models"


@cache
def spellings() -> Spellings:
    """Return the guide's names beside those of the command."""
    own = schema(COMMAND)
    table: dict[str, Setting] = {}
    for row in FIELDS:
        # a field is also known without its group, where no setting has the name
        names = [row.flat_name, *(name for name in (row.name, *row.short) if name not in own)]
        default = own[row.to].default if row.to in own else None
        table |= {name: replace(row.setting(name), default=default) for name in names}
    return Spellings(table | {TASK.name: TASK}, ENVIRONMENT, translate, _WORDS)


def field_of(name: str) -> GuideField:
    """Return the field that one of the names stands for."""
    return next(row for row in FIELDS if name in (row.flat_name, row.name, *row.short))


def translate(option: GivenSetting, value: Any) -> Translated:
    """Return what a setting of the guide means here: settings, a note, or a refusal with the reason."""
    if option.name == TASK.name:
        return _task(option, value)
    row = field_of(option.name)
    said = () if option.name == row.flat_name else (f"{option.written} is {row.group}.{row.name} of the guide",)
    special = _SPECIAL.get(row.flat_name)
    if row.to in schema(COMMAND) and special is None:
        return Translated((_renamed(option, row.to, option.texts),), said)
    assert special is not None, f"{row.flat_name} has neither a setting nor a meaning"
    meant = special(option, value)
    return Translated(meant.options, (*said, *meant.notes), meant.problems, meant.later)


def _renamed(option: GivenSetting, name: str, texts: tuple[str, ...]) -> GivenSetting:
    return replace(option, name=name, texts=texts)


def _refused(option: GivenSetting, reason: str, do: str) -> Translated:
    shown = f"{option.written} {' '.join(option.texts)}".strip()
    return Translated(problems=(refused_setting(option, shown, reason, do),))


def _no_effect(option: GivenSetting, reason: str) -> Translated:
    return Translated(notes=(f"{option.written} = {' '.join(option.texts)} ({option.origin}) has no effect: {reason}",))


def _task(option: GivenSetting, value: str) -> Translated:
    if value == _OWN_TASK:
        return Translated()
    do = _TASKS.get(value, "rft-train pretrain")
    reason = _NO_TASK if value not in _TASKS or value == "regression" else f"each task is a command: {do}"
    return _refused(option, reason, do)


def _schedule(option: GivenSetting, value: str) -> Translated:
    if value == "step":
        return _refused(option, "no schedule falls in steps", "--lr_schedule linear")
    if value == "plateau":
        reason = "the rate is a function of the step alone, so that a resumed run repeats it"
        return _refused(option, f"{reason}; a run ends on a plateau with --patience", "--lr_schedule cosine")
    return Translated((_renamed(option, "lr_schedule", option.texts),))


def _warmup(option: GivenSetting, epochs: float) -> Translated:
    def later(given: SourcedValues) -> Derived:
        twice = [name for name in _WARMUPS if given.origins[name].kind == option.origin.kind]
        if twice:
            why = f"{option.written} {as_text(epochs)} says the same in epochs"
            return Derived(problems=(given.make_problem("pretrainer.two_warmups", twice, why, _leave(option)),))
        run = given.values["max_epochs"]
        ratio = min(1.0, epochs / run)
        note = f"{option.written} {as_text(epochs)} of {run} epochs: lr_warmup_ratio = {ratio:g}, a share of all steps"
        return Derived({"lr_warmup_ratio": ratio, "lr_warmup_steps": None}, option.origin, (note,))

    return Translated(later=later)


def _leave(option: GivenSetting) -> str:
    return f"leave {option.written} out"


def _validation(option: GivenSetting, wanted: bool) -> Translated:
    def later(given: SourcedValues) -> Derived:
        named = [name for name in ("held_out_share", "eval_data") if given.values[name]]
        if wanted and named:
            return Derived()
        if wanted:
            note = f"{option.written}: the last {HELD_OUT_SHARE:g} of the text is held out (held_out_share)"
            return Derived({"held_out_share": HELD_OUT_SHARE}, option.origin, (note,))
        notes = [
            f"{name} = {given.values[name]} ({given.origins[name]}) is not used: {option.written}" for name in named
        ]
        return Derived({"held_out_share": 0.0, "eval_data": ""}, option.origin, tuple(notes))

    return Translated(later=later)


def _backend(option: GivenSetting, value: str) -> Translated:
    if value == "nccl":
        return Translated(notes=(f"{option.written} nccl: GPUs use it, and ranks on a CPU use gloo",))
    return _refused(option, "the backend follows from the device", "NCCL_BACKEND=gloo in front of the command")


def _meeting(option: GivenSetting, value: object) -> Translated:
    """Keep what `nodes.nodes` reads."""
    return Translated()


def _processes(option: GivenSetting, value: int) -> Translated:
    return Translated((_renamed(option, "nproc", (str(value),)),))


def _compile(option: GivenSetting, wanted: bool) -> Translated:
    is_on = wanted != (option.name == NO_COMPILE)
    return Translated((_renamed(option, "compile", ("auto" if is_on else "off",)),))


def _resume(option: GivenSetting, value: str | None) -> Translated:
    if value in (None, "", "none"):
        return Translated()
    on = _renamed(option, "load_checkpoint", ("true",))
    if value in ("auto", "true"):
        return Translated((on,))
    return Translated((on, _renamed(option, "ckpt_path", (str(value),))))


def _log_level(option: GivenSetting, value: str) -> Translated:
    if value == "DEBUG":
        return Translated((_renamed(option, "debug", ("true",)),))
    if value == "INFO":
        return Translated()
    return _refused(option, "steps and warnings are printed at one level", "--log_interval 100")


def _save_logs(option: GivenSetting, wanted: bool) -> Translated:
    if wanted:
        return Translated()
    return _refused(option, "a run that fails is explained by the log of each rank", _leave(option))


def _no_loader(option: GivenSetting, value: object) -> Translated:
    return _no_effect(option, "windows are read from a memory map in microseconds; no process prefetches them")


_WORDS: dict[str, dict[str, str]] = {
    "amp_dtype": {"float16": "fp16", "bfloat16": "bf16"},
}
"""Values that have another word here."""
_SPECIAL: dict[str, Callable[[GivenSetting, Any], Translated]] = {
    "training_scheduler_type": _schedule,
    "training_warmup_epochs": _warmup,
    "training_run_validation": _validation,
    "distributed_master_addr": _meeting,
    "distributed_master_port": _meeting,
    "distributed_num_nodes": _meeting,
    "distributed_node_rank": _meeting,
    "distributed_gpus_per_node": _processes,
    "distributed_backend": _backend,
    "optimization_use_compile": _compile,
    "optimization_prefetch_factor": _no_loader,
    "optimization_persistent_workers": _no_loader,
    "checkpoint_resume_from_checkpoint": _resume,
    "logging_log_level": _log_level,
    "logging_save_logs": _save_logs,
}
