"""Parallel strategies that exclude one another, and settings that need full weights on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rft_core.errors import Problem

Complain = Callable[[str, list[str], str, str], Problem]
"""(code, names of the settings, why, remedy) -> the problem, with values and origins filled in."""


def strategy_problems(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Contradictions between the settings of the strategy, the model and the engine."""
    fsdp, stage = values["fsdp"], values["zero_stage"]
    if fsdp and stage:
        why = "FSDP2 and DeepSpeed each spread the same weights; one of them does"
        yield complain("strategy.two", ["fsdp", "zero_stage"], why, "--fsdp, or --zero_stage 3 without it")
    if values["overlap_comm"] and stage == 1:
        why = "DeepSpeed sums gradients after the backward pass at stage 1"
        yield complain("strategy.overlap_stage", ["overlap_comm", "zero_stage"], why, "--zero_stage 2")
    yield from _precision(values, complain)
    yield from _without_memory(values, complain)
    if values["enable_ema"]:
        yield from _averages(values, complain)
    if fsdp or stage or values["tp_size"] > 1:
        yield from _with_blocks(values, complain)
    yield from _together(values, complain)
    if values["sp_size"] > 1 and values["aux_loss_coef"]:
        why = "the routers' loss counts the experts of whole rows, which no rank has"
        yield complain("strategy.sp_router", ["sp_size", "aux_loss_coef"], why, "--sp_size 1")


def _together(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of tensor and sequence parallelism: a group of ranks uses one of them."""
    size = values["tp_size"]
    if size > 1:
        if values["zero_stage"]:
            why = "DeepSpeed lays whole matrices out; FSDP2 spreads the parts of one as ZeRO 3 spreads it whole"
            do = f"--fsdp --tp_size {size} (without zero_stage), or --zero_stage {values['zero_stage']} --tp_size 1"
            yield complain("strategy.tp_blocks", ["tp_size", "zero_stage"], why, do)
        if values["fsdp"]:
            yield from _parts_in_blocks(values, complain)
        if values["sp_size"] > 1:
            why = "a group shares out the heads, or the tokens of a sequence"
            do = f"--sp_size {values['sp_size']} --fsdp --tp_size 1, or --tp_size {size} --sp_size 1"
            yield complain("strategy.tp_sp", ["tp_size", "sp_size"], why, do)
        if values["aux_loss_coef"]:
            why = "mixtures of experts are not cut over ranks"
            yield complain("strategy.tp_router", ["tp_size", "aux_loss_coef"], why, "--fsdp --tp_size 1")
    if values["sp_mode"] != "auto" and values["sp_size"] == 1:
        why = "there is one rank a sequence, and nothing to share out"
        yield complain("strategy.sp_mode", ["sp_mode", "sp_size"], why, "--sp_size 2, or leave sp_mode out")
    if values["sp_mode"] == "ring" and values["sp_size"] > 1 and values["flash_attn"]:
        why = "in a ring the scores are computed tile by tile, and not by the package"
        yield complain("strategy.ring_kernel", ["sp_mode", "flash_attn"], why, "--sp_mode ulysses, or no --flash_attn")


def _parts_in_blocks(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of tensor parallel shards that FSDP2 shards again over ranks with the same parts."""
    for name, why in (
        ("shard_size", "parts are spread over all ranks that hold the same, which is what a shard_size would lower"),
        ("fsdp_cpu_offload", "gradients of norms are summed over the ranks of a group, on the device"),
        ("meta_init", "parts are compared with the whole model before they are spread, so that it is loaded whole"),
    ):
        if values[name] not in (None, False):
            yield complain("strategy.tp_fsdp", ["tp_size", name], why, f"leave {name} out, or --fsdp --tp_size 1")


def _averages(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of EMA, which averages the model's own full matrices."""
    if values["train_only_tokens_from"] >= 0:
        why = "the average is of whole matrices, and rows of one are trained"
        yield complain("strategy.ema_rows", ["enable_ema", "train_only_tokens_from"], why, "leave enable_ema out")


def _precision(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of precision settings: one dtype is computed in."""
    if not values["fp16"]:
        return
    for other in ("bf16", "use_mp_opt"):
        if values[other]:
            why = "weights are computed with in float16 or in bfloat16"
            yield complain("strategy.two_types", ["fp16", other], why, f"--{other} alone: it needs no loss scale")
    if values["zero_stage"]:
        why = "DeepSpeed scales losses in its own way, and not on every device; FSDP2 spreads as much with ours"
        yield complain("strategy.fp16_zero", ["fp16", "zero_stage"], why, "--fsdp --fp16 (and leave zero_stage out)")


def _without_memory(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of `meta_init`, which needs FSDP2 and files that hold exactly these weights."""
    if not values["meta_init"]:
        return
    if not values["fsdp"]:
        why = "a rank reads its blocks alone where it keeps blocks; DeepSpeed and replicas take whole weights"
        names = ["meta_init", "zero_stage"] if values["zero_stage"] else ["meta_init", "fsdp"]
        yield complain("strategy.meta_whole", names, why, "--fsdp --meta_init")
    if values.get("load_in_4bit"):
        why = "blocks are read straight from the files, which hold no rounded weights"
        yield complain("strategy.meta_adapters", ["meta_init", "load_in_4bit"], why, "leave meta_init out")
    for name in ("ckpt_weights_only", "ckpt_partial"):
        if values[name]:
            why = "weights are taken over from whole tensors of two directories"
            do = f"--pretrain {values['ckpt_path'] or 'RUN'}/checkpoints/step_N/model (and leave {name} out)"
            yield complain("strategy.meta_weights", ["meta_init", name], why, do)


def _with_blocks(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """Yield the contradictions of settings that need full weights on every rank."""
    how = "fsdp" if values["fsdp"] else "zero_stage" if values["zero_stage"] else "tp_size"
    if values["train_only_tokens_from"] >= 0:
        why = "the trained rows are a part of a matrix that no rank holds whole"
        yield complain("strategy.rows", ["train_only_tokens_from", how], why, f"leave {how} out")
    if values.get("engine_type") == "hf":
        why = "transformers' generate reads whole weights; the native engine takes a copy of its own"
        yield complain("strategy.hf", ["engine_type", how], why, "--engine_type native")
    if values.get("save_value_network"):
        why = "the ranks write the policy's weights together, and a value network is written by one"
        yield complain("strategy.value_network", ["save_value_network", how], why, "leave save_value_network out")
    if values.get("patience"):
        why = "patience keeps the best weights whole, on every rank"
        yield complain("strategy.patience", ["patience", how], why, "--patience 0")
