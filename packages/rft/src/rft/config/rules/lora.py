"""Settings that contradict LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft.config.rules.sourced_values import MakeProblem
from rft_core.errors import Problem
from rft_dist.strategies.registry import choose_strategy, sharding_settings, strategy_settings

NEEDS_RANK = ("lora_alpha", "lora_dropout", "target_modules", "lora_type")
"""Settings that act only beside `lora_rank`."""


def adapter_problems(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions between the settings of adapters and the others."""
    if not values["lora_rank"]:
        if values.get("load_in_4bit"):
            why = "weights in 4 bits cannot be trained themselves"
            yield make_problem("adapters.only_4bit", ["load_in_4bit", "lora_rank"], why, "--lora_rank 16")
        return
    yield from _beside_weights(values, make_problem)
    if values.get("lora_dropout"):
        yield from _dropout(values, make_problem)


def _beside_weights(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions with other choices of trained weights, and with parallel strategies."""
    for name in ("freeze_prefix", "train_only_tokens_from"):
        if values.get(name, "") not in ("", -1):
            why = "with adapters every weight of the model is frozen already"
            yield make_problem("adapters.frozen_too", ["lora_rank", name], why, f"leave {name} out")
    if values["optimizer"] == "muon":
        why = "muon orthogonalises matrices, and of an adapter's product A and B alone are matrices"
        yield make_problem("adapters.muon", ["lora_rank", "optimizer"], why, "--optimizer adamw")
    if values["ckpt_partial"]:
        why = "a run that continues loads the weights under its adapters from a directory, and none has this mixture"
        yield make_problem("adapters.partial", ["lora_rank", "ckpt_partial"], why, "--ckpt_weights_only")
    settings = strategy_settings(values)
    strategy = choose_strategy(settings)
    if values["lora_type"] == "dora" and strategy.group_sizes(settings).matrix > 1:
        name = strategy.matrix_setting
        why = "the length of a row of W + s B A is that of the whole row, of which a rank may have a part"
        do = f"--lora_type rslora --{name} {values[name]}, or --lora_type dora --fsdp --{name} 1"
        yield make_problem("adapters.tp_dora", ["lora_type", name], why, do)
    if values.get("load_in_4bit"):
        for name in _dividing_settings(values):
            why = "weights in 4 bits cannot be sharded, cut into parts or flattened into one tensor"
            yield make_problem("adapters.4bit_blocks", ["load_in_4bit", name], why, f"leave {name} out")


def _dividing_settings(values: Mapping[str, Any]) -> list[str]:
    """Return the settings by which no rank has all of a matrix, or of a sample."""
    settings = strategy_settings(values)
    strategy = choose_strategy(settings)
    names = [strategy.sequence_setting] if strategy.group_sizes(settings).sequence > 1 else []
    names += [strategy.matrix_setting] if strategy.group_sizes(settings).matrix > 1 else []
    return list(dict.fromkeys([*sharding_settings(values), *names]))


def _dropout(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    for name in _dividing_settings(values):
        why = "its masks follow from whole samples and whole adapters"
        yield make_problem("adapters.dropout_blocks", ["lora_dropout", name], why, "--lora_dropout 0")
    if values.get("images_key"):
        why = "its masks follow from token ids, and a row with images reaches the layers as embeddings"
        yield make_problem("adapters.dropout_images", ["lora_dropout", "images_key"], why, "--lora_dropout 0")
