"""What must hold between settings, and which settings have no effect beside the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rft_algos.algorithms import PolicyAlgorithm
from rft_algos.errors import OptionsError, Problem
from rft_cli.config.origins import Origin
from rft_cli.config.schema import build
from rft_cli.config.values import as_text

Values = Mapping[str, Any]
Origins = Mapping[str, Origin]


def contradictions(command: str, values: Values, origins: Origins) -> list[Problem]:
    """Combinations that cannot be run, each with its arithmetic and one way out."""
    checks = [_engine, _lengths, _frozen]
    if command == "sft":
        checks += [_nothing_to_wait_for]
    if command == "rl":
        checks += [_sampling_for_training, _divergence, _algorithm]
    return [problem for check in checks for problem in check(values, origins)]


def _engine(values: Values, origins: Origins) -> Iterator[Problem]:
    if values.get("engine_type", "vllm") == "vllm":
        return
    if values.get("engine_tp_size", 1) > 1:
        yield _problem(
            "engine.native_one_device",
            origins,
            values,
            ["engine_tp_size", "engine_type"],
            "this engine works on one device; vllm alone splits a model",
            "--engine_type vllm",
        )
    if values.get("engine_mem_util") is not None:
        yield _problem(
            "engine.native_no_reserve",
            origins,
            values,
            ["engine_mem_util", "engine_type"],
            "this engine reserves no memory: its size follows from its rows and lengths; vllm alone takes a share",
            f"--engine_max_rows {values['engine_max_rows']} (and leave engine_mem_util out)",
        )
    if values.get("engine_fp8"):
        yield _problem(
            "engine.native_no_fp8",
            origins,
            values,
            ["engine_fp8", "engine_type"],
            "this engine computes with the weights as they are; vllm rounds its copy of them",
            "--engine_type vllm",
        )


def _lengths(values: Values, origins: Origins) -> Iterator[Problem]:
    if (
        values.get("max_len") is not None
        and "prompt_max_len" in values
        and values["max_len"] <= values["prompt_max_len"]
    ):
        yield _problem(
            "length.no_room",
            origins,
            values,
            ["max_len", "prompt_max_len"],
            "prompt and response share max_len: a longest prompt would leave no token for its response",
            f"--prompt_max_len {max(1, values['max_len'] // 2)}",
        )


def _frozen(values: Values, origins: Origins) -> Iterator[Problem]:
    if values.get("freeze_prefix") and values["train_only_tokens_from"] >= 0:
        yield _problem(
            "freezing.two_ways",
            origins,
            values,
            ["freeze_prefix", "train_only_tokens_from"],
            "where only the rows of some tokens are trained, every other weight is frozen already",
            f"--train_only_tokens_from {values['train_only_tokens_from']} (and leave freeze_prefix out)",
        )


def _sampling_for_training(values: Values, origins: Origins) -> Iterator[Problem]:
    if values["temperature"] == 0.0:
        why = "greedy responses of one prompt are all the same, so that no advantage differs from 0"
        yield _problem("sampling.greedy", origins, values, ["temperature"], why, "--temperature 1.0")


def _nothing_to_wait_for(values: Values, origins: Origins) -> Iterator[Problem]:
    for name in ("patience", "target_loss"):
        if values[name] and not values["eval_data"] and not values["held_out_rows"]:
            why = f"{name} looks at the held-out loss, and no rows are held out"
            yield _problem("sft.no_held_out", origins, values, [name, "held_out_rows"], why, "--held_out_rows 200")


def _divergence(values: Values, origins: Origins) -> Iterator[Problem]:
    if values["use_kl_loss"] and values["init_kl_coef"] == 0.0 and origins["use_kl_loss"].kind != "default":
        yield _problem(
            "kl.no_weight",
            origins,
            values,
            ["use_kl_loss", "init_kl_coef"],
            "the divergence would enter the loss with weight 0",
            "--init_kl_coef 0.001",
        )


def _algorithm(values: Values, origins: Origins) -> Iterator[Problem]:
    """What the record of the algorithm says of flags that do not go together."""
    try:
        _record(values)
    except OptionsError as error:
        problem = error.problem
        named = [name for name in origins if re.search(rf"\b{re.escape(name)}\b", problem.what)]
        if all(origins[name].kind == "default" for name in named):
            chosen = ("advantage_estimator", "policy_loss", "use_gspo", "use_gmpo")
            named += [name for name in chosen if origins[name].kind != "default"]
        where = ", ".join(f"{name}: {origins[name]}" for name in named or ["advantage_estimator"])
        yield replace(problem, where=where)


def _record(values: Values) -> PolicyAlgorithm:
    from rft_cli.algorithm_choice import algorithm_record  # here, so that pages do not wait for it

    return algorithm_record(build("rl", values))


def _problem(code: str, origins: Origins, values: Values, names: list[str], why: str, do: str) -> Problem:
    what = ", ".join(f"{name} = {as_text(values[name])}" for name in names)
    where = ", ".join(f"{name}: {origins[name]}" for name in names)
    return Problem(code=code, what=what, where=where, why=why, do=do)


_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
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
    "ckpt_path": ("load_checkpoint", bool),
    "held_out_rows": ("eval_data", lambda path: not path),
    "min_improvement": ("patience", bool),
    "system_prompt": ("apply_chat_template", bool),
    "min_lr_ratio": ("lr_schedule", lambda schedule: schedule != "constant"),
}
"""Settings that act only when another one is on."""


def notes(values: Values, origins: Origins, defaults: Values) -> list[str]:
    """What was asked for and has no effect beside the other settings, so that it is said and not passed over.

    A value that is the default anyway says nothing (the config.yaml of a run holds every setting).
    """
    told: list[str] = []
    if "advantage_estimator" in values:
        told += _idle_parts(values, origins, defaults)
    for name, (condition, holds) in _NEEDS.items():
        asked = name in values and origins[name].kind != "default" and values[name] != defaults[name]
        if asked and not holds(values[condition]):
            state = f"{condition} is {as_text(values[condition]) or 'empty'} ({origins[condition]})"
            told.append(f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {state}")
    return told


def _idle_parts(values: Values, origins: Origins, defaults: Values) -> list[str]:
    """Flags of parts that the chosen algorithm does not have."""
    record = _record(values)
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
