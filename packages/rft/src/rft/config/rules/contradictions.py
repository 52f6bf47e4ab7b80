"""Contradictions between settings, and settings that have no effect beside the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rft.config.commands import configured, load
from rft.config.rules.constraint import constraint_problems
from rft.config.rules.environment import environment_problems, idle_environment_settings
from rft.config.rules.images import idle_image_settings, image_problems
from rft.config.rules.lora import NEEDS_RANK
from rft.config.rules.rewards import idle_reward_settings
from rft.config.rules.sourced_values import MakeProblem, Origins, SourcedValues, Values
from rft.config.values import as_text
from rft_core.errors import Problem
from rft_dist.settings import FACTOR_SETTINGS, factors_refusal
from rft_dist.strategies.registry import STRATEGIES
from rft_engine.registry import limits_met
from rft_models.settings import freezing_refusal
from rft_trainer.settings.data import system_prompt_refusal
from rft_trainer.settings.evaluation import draws_refusal, equal_samples_refusal, pick_refusal

Check = Callable[[Values, MakeProblem], Iterator[Problem]]


def contradictions(command: str, values: Values, origins: Origins) -> list[Problem]:
    """Combinations that cannot be run, each with its arithmetic and one way out."""
    given = SourcedValues(values, origins)
    checks: list[Check] = [_engine, _lengths, _frozen, _factors, _system_prompt, _samples]
    checks += [environment_problems, image_problems, constraint_problems]
    problems = [problem for check in checks for problem in check(values, given.make_problem)]
    rules = configured(command).rules
    return [*problems, *load(rules)(given)] if rules else problems


def _engine(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the problems of settings that the chosen engine does not carry out."""
    for limit in limits_met(values):
        yield make_problem(limit.code, list(limit.settings), limit.why, limit.remedy.format_map(dict(values)))


def _lengths(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if (
        values.get("max_len") is not None
        and "prompt_max_len" in values
        and values["max_len"] <= values["prompt_max_len"]
    ):
        yield make_problem(
            "length.no_room",
            ["max_len", "prompt_max_len"],
            "prompt and response share max_len: a longest prompt would leave no token for its response",
            f"--prompt_max_len {max(1, values['max_len'] // 2)}",
        )


def _frozen(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if "freeze_prefix" not in values:
        return
    refusal = freezing_refusal(values["freeze_prefix"], values["train_only_tokens_from"])
    if refusal is not None:
        yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)


def _factors(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in FACTOR_SETTINGS:
        refusal = factors_refusal(name, values.get(name, ""))
        if refusal is not None:
            yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)


def _system_prompt(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if "system_prompt" not in values:
        return
    refusal = system_prompt_refusal(values["system_prompt"], apply_chat_template=values["apply_chat_template"])
    if refusal is not None:
        yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)


def _samples(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if "eval_n" not in values:
        return
    several = next((name for name in ("num_beams", "eval_beams") if values.get(name)), "eval_n")
    flag = "eval_temperature" if "eval_temperature" in values else "temperature"
    for refusal in (
        equal_samples_refusal(values["eval_n"], values[flag], flag=flag),
        draws_refusal(values[several], values["eval_k"], several),
        pick_refusal(values["eval_n"], values["eval_pick"]),
    ):
        if refusal is not None:
            yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)


_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("lora_rank", bool) for name in NEEDS_RANK},
    "chunk_size": ("fused_linear_logprob", bool),
    "l2_factors": ("l2", bool),
    **{
        name: ("eval_data", bool)
        for name in (
            *("eval_metrics", "eval_n", "eval_k", "eval_pick", "eval_temperature", "eval_beams", "keep_best"),
            *("eval_input_key", "eval_label_key", "eval_output_key"),
        )
    },
    **{
        name: ("pretrain_data", bool)
        for name in ("ptx_coef", "pretrain_data_probs", "pretrain_split", "pretrain_input_key", "pretrain_output_key")
    },
    "pretrain_text_key": ("pretrain_data", bool),
    "gradient_checkpointing_mode": ("gradient_checkpointing", bool),
    "gradient_checkpointing_every": ("gradient_checkpointing", bool),
    "overlong_buffer_penalty_factor": ("overlong_buffer", lambda on: on is not False),
    "overlong_buffer_len": ("overlong_buffer", lambda on: on is not False),
    "first_token_temperature": ("use_fire", bool),
    "constraint_logprobs": ("constraint", bool),
    "dynamic_sampling_rounds": ("dynamic_sampling", lambda on: on is not False),
    "kl_horizon": ("kl_target", bool),
    "off_policy_cap": ("off_policy_correction", lambda word: word in ("tis", "seq-tis", "geo-tis")),
    "num_trajectories_to_save": ("save_trajectories", bool),
    "rollout_log_interval": ("save_trajectories", bool),
    "max_rollbacks": ("save_model_only", lambda on: not on),
    "prefetch_factor": ("num_workers", lambda count: count != 0),
    "wandb_org": ("use_wandb", bool),
    "wandb_group": ("use_wandb", bool),
    "wandb_run_name": ("use_wandb", bool),
    "held_out_rows": ("eval_data", lambda path: not path),
    "min_improvement": ("patience", bool),
    **{name: (row.setting, acts) for row in STRATEGIES for name, acts in row.options.items()},
    "ema_decay": ("enable_ema", bool),
    "amp_dtype": ("amp", bool),
    "balance_bias_rate_end": ("balance_bias_rate", bool),
    "async_deterministic": ("max_staleness", bool),
    "max_logprob_gap": ("max_staleness", lambda versions: versions == 0),
    "min_lr_ratio": ("lr_schedule", lambda schedule: schedule != "constant"),
    **{name: ("lr_schedule", lambda schedule: schedule == "wsd") for name in ("lr_decay_ratio", "lr_decay_tokens")},
    "lr_warmup_ratio": ("lr_warmup_steps", lambda steps: steps is None),
}
"""Settings that act only when another one is on."""


def notes(command: str, values: Values, origins: Origins, defaults: Values) -> list[str]:
    """Return a note for every setting that was asked for and has no effect beside the others.

    A value that is the default anyway gives no note (the config.yaml of a run holds every setting).
    """
    own = configured(command).notes
    lines: list[str] = load(own)(SourcedValues(values, origins), defaults) if own else []
    lines += idle_image_settings(values, origins, defaults)
    lines += idle_environment_settings(values, origins, defaults)
    ways = ("load_checkpoint", "ckpt_weights_only", "ckpt_partial")
    if values.get("ckpt_path") and not any(values[name] for name in ways):
        lines.append(f"ckpt_path = {values['ckpt_path']} ({origins['ckpt_path']}) has no effect: {ways[0]} is false")
    made = str(getattr(configured(command), "makes", "")).split()
    for name, (condition, holds) in _NEEDS.items():
        if condition in made:
            continue
        # a loss can be that of a share of the training text
        known = name in values and condition in values and not (name == "keep_best" and values.get("held_out_share"))
        asked = known and origins[name].kind != "default" and values[name] != defaults[name]
        if asked and not holds(values[condition]):
            state = f"{condition} is {as_text(values[condition]) or 'empty'} ({origins[condition]})"
            lines.append(f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {state}")
    for name, why in idle_reward_settings(values):
        if origins[name].kind != "default" and values[name] != defaults[name]:
            lines.append(f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {why}")
    return lines
