"""Contradictions between settings, and settings that have no effect beside the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rft.resolved import Origin
from rft_cli.config.rules.environment import environment_problems, idle_environment_settings
from rft_cli.config.rules.images import idle_image_settings, image_problems
from rft_cli.config.rules.lora import NEEDS_RANK, adapter_problems
from rft_cli.config.rules.rewards import idle_reward_settings, reward_problems
from rft_cli.config.rules.strategy import MakeProblem, strategy_problems
from rft_cli.config.schema import build
from rft_cli.config.values import as_text
from rft_core.errors import OptionsError, Problem
from rft_core.nearest_names import nearest_names
from rft_dist.strategies.registry import STRATEGIES
from rft_engine.registry import ENGINES, REFERENCE_ENGINE, limits_met
from rft_engine.settings import ComparedEnginesSettings
from rft_models.settings import freezing_refusal
from rft_trainer.settings.data import system_prompt_refusal

Values = Mapping[str, Any]
Origins = Mapping[str, Origin]
Check = Callable[[Values, MakeProblem], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class SourcedValues:
    """The settings of a command, and where each value came from."""

    values: Values
    origins: Origins

    def make_problem(self, code: str, names: list[str], why: str, do: str) -> Problem:
        """Return the problem of settings that contradict one another, with their values and origins."""
        what = ", ".join(f"{name} = {as_text(self.values[name])}" for name in names)
        where = ", ".join(f"{name}: {self.origins[name]}" for name in names)
        return Problem(code=code, what=what, where=where, why=why, do=do)


def contradictions(command: str, values: Values, origins: Origins) -> list[Problem]:
    """Combinations that cannot be run, each with its arithmetic and one way out."""
    make_problem = SourcedValues(values, origins).make_problem
    checks: list[Check] = [_engine, _lengths, _frozen, _system_prompt, environment_problems, image_problems]
    if command == "sft":
        checks += [_nothing_to_wait_for]
    if command in ("rl", "sft"):
        checks += [_weights_of_a_checkpoint, strategy_problems, partial(adapter_problems, command)]
    if command in ("rl", "eval"):
        checks += [reward_problems]
    if command == "conformance":
        checks += [_compared_engines]
    if command == "rl":
        checks += [_sampling_for_training, partial(_divergence, origins), partial(_algorithm, origins)]
    return [problem for check in checks for problem in check(values, make_problem)]


def _engine(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the problems of settings that the chosen engine does not carry out."""
    for limit in limits_met(values):
        yield make_problem(limit.code, list(limit.settings), limit.why, limit.remedy.format_map(dict(values)))


def _compared_engines(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the problems of unknown engine names, and of flags that none of the engines supports."""
    names = ComparedEnginesSettings(engines=values["engines"]).names
    for name in names:
        if name not in ENGINES:
            near = (nearest_names(name, tuple(ENGINES)) or [REFERENCE_ENGINE])[0]
            why = f"engines are {', '.join(ENGINES)}; nearest: {near}"
            yield make_problem("conformance.unknown_engine", ["engines"], why, f"--engines {near}")
    idle = all(name in ENGINES and ENGINES[name].can.shares_weights for name in names)
    for name, default in (("engine_tp_size", 1), ("engine_mem_util", None), ("engine_fp8", False)):
        if idle and values[name] != default:
            why = "native and hf compute with the trainer's own weights on its device; vllm and sglang take this"
            do = f"--engines {','.join(names)},vllm"
            yield make_problem("conformance.no_effect", [name, "engines"], why, do)


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


def _system_prompt(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if "system_prompt" not in values:
        return
    refusal = system_prompt_refusal(values["system_prompt"], apply_chat_template=values["apply_chat_template"])
    if refusal is not None:
        yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)


def _weights_of_a_checkpoint(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    ways = [name for name in ("load_checkpoint", "ckpt_weights_only", "ckpt_partial") if values[name]]
    if len(ways) > 1:
        why = "a run continues a checkpoint, or starts from all of its weights, or from some of them"
        yield make_problem("checkpoint.two_ways", ways, why, f"--{ways[0]} alone")
    elif ways and ways != ["load_checkpoint"] and not values["ckpt_path"]:
        why = "weights are taken from a named checkpoint, and none is named"
        yield make_problem("checkpoint.no_path", [ways[0], "ckpt_path"], why, "--ckpt_path RUN")


def _sampling_for_training(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["temperature"] == 0.0:
        why = "greedy responses of one prompt are all the same, so that no advantage differs from 0"
        yield make_problem("sampling.greedy", ["temperature"], why, "--temperature 1.0")


def _nothing_to_wait_for(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("patience", "target_loss"):
        if values[name] and not values["eval_data"] and not values["held_out_rows"]:
            why = f"{name} depends on the held-out loss, and no rows are held out"
            yield make_problem("sft.no_held_out", [name, "held_out_rows"], why, "--held_out_rows 200")


def _divergence(origins: Origins, values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["use_kl_loss"] and values["init_kl_coef"] == 0.0 and origins["use_kl_loss"].kind != "default":
        yield make_problem(
            "kl.no_weight",
            ["use_kl_loss", "init_kl_coef"],
            "the divergence would enter the loss with weight 0",
            "--init_kl_coef 0.001",
        )


def _algorithm(origins: Origins, values: Values, _: MakeProblem) -> Iterator[Problem]:
    """Yield the problem that `algorithm_record` reports of flags that do not go together."""
    from rft.build.algorithm import algorithm_record  # here, so that pages do not wait for it

    try:
        algorithm_record(build("rl", values))
    except OptionsError as error:
        problem = error.problem
        # the error names settings in its text, and knows nothing of their origins
        named = [name for name in origins if re.search(rf"\b{re.escape(name)}\b", problem.what)]
        # defaults were not chosen by anybody: what chose the algorithm is named too
        if all(origins[name].kind == "default" for name in named):
            chosen = ("advantage_estimator", "policy_loss", "use_gspo", "use_gmpo")
            named += [name for name in chosen if origins[name].kind != "default"]
        where = ", ".join(f"{name}: {origins[name]}" for name in named or ["advantage_estimator"])
        yield replace(problem, where=where)


_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("lora_rank", bool) for name in NEEDS_RANK},
    "chunk_size": ("fused_linear_logprob", bool),
    "gradient_checkpointing_mode": ("gradient_checkpointing", bool),
    "gradient_checkpointing_every": ("gradient_checkpointing", bool),
    "overlong_buffer_penalty_factor": ("overlong_buffer", lambda on: on is not False),
    "overlong_buffer_len": ("overlong_buffer", lambda on: on is not False),
    "first_token_temperature": ("use_fire", bool),
    "dynamic_sampling_rounds": ("dynamic_sampling", lambda on: on is not False),
    "kl_horizon": ("kl_target", bool),
    "off_policy_cap": ("off_policy_correction", lambda word: word in ("tis", "seq-tis")),
    "num_trajectories_to_save": ("save_trajectories", bool),
    "rollout_log_interval": ("save_trajectories", bool),
    "prefetch_factor": ("num_workers", lambda count: count > 0),
    "wandb_org": ("use_wandb", bool),
    "wandb_group": ("use_wandb", bool),
    "wandb_run_name": ("use_wandb", bool),
    "held_out_rows": ("eval_data", lambda path: not path),
    "min_improvement": ("patience", bool),
    **{name: (row.setting, acts) for row in STRATEGIES for name, acts in row.options.items()},
    "ema_decay": ("enable_ema", bool),
    "async_deterministic": ("max_staleness", bool),
    "max_logprob_gap": ("max_staleness", lambda versions: versions == 0),
    "min_lr_ratio": ("lr_schedule", lambda schedule: schedule != "constant"),
}
"""Settings that act only when another one is on."""


def notes(values: Values, origins: Origins, defaults: Values) -> list[str]:
    """Return a note for every setting that was asked for and has no effect beside the others.

    A value that is the default anyway gives no note (the config.yaml of a run holds every setting).
    """
    lines: list[str] = []
    if "advantage_estimator" in values:
        lines += _idle_parts(values, origins, defaults)
    lines += idle_image_settings(values, origins, defaults)
    lines += idle_environment_settings(values, origins, defaults)
    ways = ("load_checkpoint", "ckpt_weights_only", "ckpt_partial")
    if values.get("ckpt_path") and not any(values[name] for name in ways):
        lines.append(f"ckpt_path = {values['ckpt_path']} ({origins['ckpt_path']}) has no effect: {ways[0]} is false")
    for name, (condition, holds) in _NEEDS.items():
        asked = name in values and origins[name].kind != "default" and values[name] != defaults[name]
        if asked and not holds(values[condition]):
            state = f"{condition} is {as_text(values[condition]) or 'empty'} ({origins[condition]})"
            lines.append(f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {state}")
    for name, why in idle_reward_settings(values):
        if origins[name].kind != "default" and values[name] != defaults[name]:
            lines.append(f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {why}")
    return lines


def _idle_parts(values: Values, origins: Origins, defaults: Values) -> list[str]:
    """Flags of parts that the chosen algorithm does not have."""
    from rft.build.algorithm import algorithm_record

    record = algorithm_record(build("rl", values))
    scores_again = record.needs_reference or record.needs_old_logprobs or record.needs_old_entropy
    needs_values = record.advantage.needs_values
    parts = (
        (("kl_estimator",), record.needs_reference, "there is no divergence from a reference"),
        (("micro_rollout_batch_size",), scores_again or needs_values, "nothing scores the rollouts again"),
        (
            (
                "critic_pretrain",
                "critic_learning_rate",
                "value_clip",
                "value_head_prefix",
                "save_value_network",
                "freezing_actor_steps",
            ),
            needs_values,
            "there is no critic",
        ),
    )
    return [
        f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: "
        f"{why} with advantage_estimator {values['advantage_estimator']}"
        for names, acts, why in parts
        for name in names
        if not acts and origins[name].kind != "default" and values[name] != defaults[name]
    ]
