"""Parallel strategies that exclude one another, and settings that need full weights on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft.config.rules.sourced_values import MakeProblem
from rft_core.errors import Problem
from rft_dist.strategies.registry import refusals, sharding_settings
from rft_engine.registry import REFERENCE_ENGINE, engine_kind


def strategy_problems(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions between the settings of the strategy, the model and the engine."""
    for refusal in refusals(values):
        yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.remedy(values))
    yield from _precision(values, make_problem)
    yield from _without_memory(values, make_problem)
    if values["enable_ema"]:
        yield from _averages(values, make_problem)
    if names := sharding_settings(values):
        yield from _with_blocks(values, names[0], make_problem)


def whole_experts(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Refuse divided experts where a model is scored or copied between its updates, which only whole ones are for."""
    if values["ep_size"] > 1:
        why = "divided experts are for pretrain and sft: engines and references have not been run beside them"
        yield make_problem("strategy.ep_command", ["ep_size"], why, "--ep_size 1, or --fsdp in place of it")


def _averages(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions of EMA, which averages the model's own full matrices."""
    if values.get("train_only_tokens_from", -1) >= 0:
        why = "the average covers full matrices, and here only rows of one are trained"
        yield make_problem("strategy.ema_rows", ["enable_ema", "train_only_tokens_from"], why, "leave enable_ema out")


def _precision(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions of precision settings: one dtype is computed in."""
    if values["amp"]:
        for other in ("bf16", "fp16", "use_mp_opt"):
            if values[other]:
                why = "amp rounds the products of float32 weights, and here the weights are narrower already"
                yield make_problem("strategy.amp_narrow", ["amp", other], why, f"--amp alone, or --{other} alone")
    if values["amp"] and values.get("load_in_4bit"):
        why = "weights in 4 bits have a type of their own for their products"
        yield make_problem("strategy.amp_4bit", ["amp", "load_in_4bit"], why, "leave amp out")
    if not values["fp16"]:
        return
    for other in ("bf16", "use_mp_opt"):
        if values[other]:
            why = "the forward computes in float16 or in bfloat16, not in both"
            yield make_problem("strategy.two_types", ["fp16", other], why, f"--{other} alone: it needs no loss scale")


def _without_memory(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions of `meta_init`, which needs FSDP2 and files that hold exactly these weights."""
    if not values["meta_init"]:
        return
    if not values["fsdp"]:
        why = "a rank reads only its shards where weights are sharded; DeepSpeed and replicas load full weights"
        names = ["meta_init", "zero_stage"] if values["zero_stage"] else ["meta_init", "fsdp"]
        yield make_problem("strategy.meta_whole", names, why, "--fsdp --meta_init")
    if values.get("load_in_4bit"):
        why = "blocks are read straight from the files, which hold no rounded weights"
        yield make_problem("strategy.meta_adapters", ["meta_init", "load_in_4bit"], why, "leave meta_init out")
    for name in ("ckpt_weights_only", "ckpt_partial"):
        if values[name]:
            why = "weights are copied between the full tensors of two directories"
            do = f"--pretrain {values['ckpt_path'] or 'RUN'}/checkpoints/step_N/model (and leave {name} out)"
            yield make_problem("strategy.meta_weights", ["meta_init", name], why, do)


def _with_blocks(values: Mapping[str, Any], how: str, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions of `how`, which chose the strategy, with what needs full weights on every rank."""
    engine = engine_kind(values.get("engine_type", REFERENCE_ENGINE))
    if not engine.can.supports_sharded_policy:
        why = f"{engine.title} reads whole weights; the native engine takes a copy of its own"
        yield make_problem("strategy.hf", ["engine_type", how], why, "--engine_type native")
    if values.get("save_value_network"):
        why = "the ranks write the policy's weights together, and a value network is written by one"
        yield make_problem("strategy.value_network", ["save_value_network", how], why, "leave save_value_network out")
