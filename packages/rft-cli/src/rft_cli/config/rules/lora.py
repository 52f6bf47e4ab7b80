"""Settings that contradict LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft_cli.config.rules.strategy import MakeProblem
from rft_core.errors import Problem

NEEDS_RANK = ("lora_alpha", "lora_dropout", "target_modules", "lora_type")
"""Settings that act only beside `lora_rank`."""


_LAYOUTS = (("fsdp", False), ("zero_stage", 0), ("sp_size", 1), ("tp_size", 1))
"""Settings by which no rank has all of a matrix, or of a sample, and their values without that."""


def adapter_problems(command: str, values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions between the settings of adapters and the others."""
    if not values["lora_rank"]:
        if values["load_in_4bit"]:
            why = "weights in 4 bits cannot be trained themselves"
            yield make_problem("adapters.only_4bit", ["load_in_4bit", "lora_rank"], why, "--lora_rank 16")
        return
    yield from _beside_weights(values, make_problem)
    if values["lora_dropout"]:
        yield from _dropout(command, values, make_problem)


def _beside_weights(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the contradictions with other choices of trained weights, and with parallel strategies."""
    for name in ("freeze_prefix", "train_only_tokens_from"):
        if values[name] not in ("", -1):
            why = "with adapters every weight of the model is frozen already"
            yield make_problem("adapters.frozen_too", ["lora_rank", name], why, f"leave {name} out")
    if values["ckpt_partial"]:
        why = "a run that continues loads the weights under its adapters from a directory, and none has this mixture"
        yield make_problem("adapters.partial", ["lora_rank", "ckpt_partial"], why, "--ckpt_weights_only")
    if values["lora_type"] == "dora" and values["tp_size"] > 1:
        why = "the length of a row of W + s B A is that of the whole row, of which a rank may have a part"
        do = f"--lora_type rslora --tp_size {values['tp_size']}, or --lora_type dora --fsdp --tp_size 1"
        yield make_problem("adapters.tp_dora", ["lora_type", "tp_size"], why, do)
    if values["load_in_4bit"]:
        for name, off in _LAYOUTS:
            if values[name] != off:
                why = "weights in 4 bits cannot be cut into blocks or parts, nor laid into one tensor"
                yield make_problem("adapters.4bit_blocks", ["load_in_4bit", name], why, f"leave {name} out")


def _dropout(command: str, values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    if command == "rl":
        why = "rollouts are drawn without dropout: with it the trainer would score them under another policy"
        yield make_problem("adapters.dropout_rl", ["lora_dropout"], why, "--lora_dropout 0")
    for name, off in _LAYOUTS:
        if values[name] != off:
            why = "its masks follow from whole samples and whole adapters"
            yield make_problem("adapters.dropout_blocks", ["lora_dropout", name], why, "--lora_dropout 0")
