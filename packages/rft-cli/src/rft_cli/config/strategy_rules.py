"""Which ways to lie on the ranks go together, and what needs whole weights on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rft_algos.errors import Problem

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
    if fsdp or stage:
        yield from _with_blocks(values, complain)
    if values["sp_size"] > 1 and values["aux_loss_coef"]:
        why = "the routers' loss counts the experts of whole rows, which no rank has"
        yield complain("strategy.sp_router", ["sp_size", "aux_loss_coef"], why, "--sp_size 1")


def _with_blocks(values: Mapping[str, Any], complain: Complain) -> Iterator[Problem]:
    """What needs whole weights on every rank."""
    how = "fsdp" if values["fsdp"] else "zero_stage"
    if values["train_only_tokens_from"] >= 0:
        why = "the trained rows are a part of a matrix that no rank holds whole"
        yield complain("strategy.rows", ["train_only_tokens_from", how], why, f"leave {how} out")
    if values.get("engine_type") == "hf":
        why = "transformers' generate reads whole weights; the native engine takes a copy of its own"
        yield complain("strategy.hf", ["engine_type", how], why, "--engine_type native")
    if values.get("save_value_network"):
        why = "the ranks write the policy's weights together, and the critic's are on every rank"
        yield complain("strategy.value_network", ["save_value_network", how], why, "leave save_value_network out")
    if values.get("patience"):
        why = "patience keeps the best weights whole, on every rank"
        yield complain("strategy.patience", ["patience", how], why, "--patience 0")
