"""Which settings of the strategy, the model and the engine exclude one another, all of them and no more."""

from __future__ import annotations

import re

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve

Refused = list[tuple[str, str]]
AT = "--ckpt_path a"


def refused(command: str, words: str) -> Refused:
    """The code of every problem, with the names that it says the origins of."""
    try:
        resolve(command, ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        return [(problem.code, " ".join(re.findall(r"(\w+): ", problem.where))) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("", []),
        ("--enable_ema", []),
        ("--train_only_tokens_from 0", []),
        ("--enable_ema --train_only_tokens_from 0", [("strategy.ema_rows", "enable_ema train_only_tokens_from")]),
        ("--fp16", []),
        ("--bf16 --use_mp_opt", []),
        ("--optimizer muon", []),
        ("--optimizer muon --fsdp", []),
        ("--optimizer muon --zero_stage 2", [("strategy.muon", "optimizer zero_stage")]),
        ("--optimizer muon --tp_size 2", [("strategy.muon", "optimizer tp_size")]),
        ("--optimizer muon --fsdp --tp_size 2", [("strategy.muon", "optimizer tp_size")]),
        ("--optimizer muon --lora_rank 4", [("adapters.muon", "lora_rank optimizer")]),
        ("--amp", []),
        ("--compile auto --fsdp", []),
        ("--compile on --fsdp", [("strategy.compile", "compile fsdp")]),
        ("--compile on --tp_size 2", [("strategy.compile", "compile tp_size")]),
        ("--amp --amp_dtype fp16 --fsdp", []),
        ("--amp --bf16 --use_mp_opt", [("strategy.amp_narrow", "amp bf16"), ("strategy.amp_narrow", "amp use_mp_opt")]),
        ("--amp --fp16", [("strategy.amp_narrow", "amp fp16")]),
        ("--amp --zero_stage 2", [("strategy.amp", "amp zero_stage")]),
        ("--amp --tp_size 2", [("strategy.amp", "amp tp_size")]),
        ("--amp --load_in_4bit --lora_rank 4", [("strategy.amp_4bit", "amp load_in_4bit")]),
        ("--fp16 --bf16", [("strategy.two_types", "fp16 bf16")]),
        ("--fp16 --use_mp_opt", [("strategy.two_types", "fp16 use_mp_opt")]),
        (
            "--fp16 --bf16 --use_mp_opt",
            [("strategy.two_types", "fp16 bf16"), ("strategy.two_types", "fp16 use_mp_opt")],
        ),
        ("--max_norm_spike 9 --fsdp", []),
        ("--max_norm_spike 9 --zero_stage 1", []),
        ("--meta_init --fsdp", []),
        ("--meta_init", [("strategy.meta_whole", "meta_init fsdp")]),
        ("--meta_init --zero_stage 2", [("strategy.meta_whole", "meta_init zero_stage")]),
        (f"--meta_init --fsdp --ckpt_weights_only {AT}", [("strategy.meta_weights", "meta_init ckpt_weights_only")]),
        (f"--meta_init --fsdp --ckpt_partial model {AT}", [("strategy.meta_weights", "meta_init ckpt_partial")]),
        (f"--fsdp --ckpt_weights_only {AT}", []),
        ("--fsdp --train_only_tokens_from 0", []),
        ("--zero_stage 2 --train_only_tokens_from 5", []),
        ("--fsdp", []),
        ("--zero_stage 2", []),
    ],
)
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_training_refuses_what_its_strategy_excludes(command: str, words: str, problems: Refused) -> None:
    assert refused(command, words) == problems


@pytest.mark.parametrize(
    ("command", "words", "problems"),
    [
        ("rl", "--engine_type hf", []),
        ("rl", "--fsdp --engine_type native", []),
        ("rl", "--fsdp --engine_type hf", [("strategy.hf", "engine_type fsdp")]),
        ("rl", "--zero_stage 3 --engine_type hf", [("strategy.hf", "engine_type zero_stage")]),
        ("rl", "--tp_size 2 --train_only_tokens_from 5", []),
        ("rl", "--ep_size 2", [("strategy.ep_command", "ep_size")]),
        ("dpo", "--ep_size 2", [("strategy.ep_command", "ep_size")]),
        ("pretrain", "--ep_size 2", []),
        ("sft", "--ep_size 2 --fsdp", [("strategy.ep_size", "ep_size fsdp")]),
        ("rl", "--save_value_network --advantage_estimator ppo", []),
        (
            "rl",
            "--fsdp --save_value_network --advantage_estimator ppo",
            [("strategy.value_network", "save_value_network fsdp")],
        ),
        ("sft", "--patience 2 --held_out_rows 5", []),
        ("sft", "--fsdp --patience 2 --held_out_rows 5", []),
        ("sft", "--zero_stage 3 --patience 2 --held_out_rows 5", []),
        (
            "sft",
            "--meta_init --fsdp --lora_rank 8 --load_in_4bit",
            [("strategy.meta_adapters", "meta_init load_in_4bit"), ("adapters.4bit_blocks", "load_in_4bit fsdp")],
        ),
    ],
)
def test_sharded_weights_exclude_what_needs_them_whole(command: str, words: str, problems: Refused) -> None:
    assert refused(command, words) == problems


LORA = "--lora_rank 8"
DROPOUT, SPLIT = f"{LORA} --lora_dropout 0.1", "adapters.dropout_blocks"
ROUNDED = f"{LORA} --load_in_4bit"


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (LORA, []),
        (f"{LORA} --images_key image --tp_size 2", []),
        (DROPOUT, []),
        (f"{DROPOUT} --sp_size 2", [(SPLIT, "lora_dropout sp_size")]),
        (f"{DROPOUT} --tp_size 2", [(SPLIT, "lora_dropout tp_size")]),
        (f"{DROPOUT} --tp_size 2 --fsdp", [(SPLIT, "lora_dropout fsdp"), (SPLIT, "lora_dropout tp_size")]),
        (f"{DROPOUT} --images_key image", [("adapters.dropout_images", "lora_dropout images_key")]),
        (ROUNDED, []),
        (f"{ROUNDED} --sp_size 2", [("adapters.4bit_blocks", "load_in_4bit sp_size")]),
        (
            f"{ROUNDED} --tp_size 2 --fsdp",
            [("adapters.4bit_blocks", "load_in_4bit fsdp"), ("adapters.4bit_blocks", "load_in_4bit tp_size")],
        ),
        (f"{LORA} --freeze_prefix a", [("adapters.frozen_too", "lora_rank freeze_prefix")]),
        (f"{LORA} --train_only_tokens_from 0", [("adapters.frozen_too", "lora_rank train_only_tokens_from")]),
        (f"{LORA} --train_only_tokens_from 1", [("adapters.frozen_too", "lora_rank train_only_tokens_from")]),
        (f"{LORA} --ckpt_partial model {AT}", [("adapters.partial", "lora_rank ckpt_partial")]),
        (f"{LORA} --lora_type dora", []),
        (f"{LORA} --lora_type dora --sp_size 2", []),
        (f"{LORA} --lora_type rslora --tp_size 2", []),
        (f"{LORA} --lora_type dora --tp_size 2", [("adapters.tp_dora", "lora_type tp_size")]),
        ("--load_in_4bit", [("adapters.only_4bit", "load_in_4bit lora_rank")]),
        ("--lora_dropout 0.1 --freeze_prefix a", []),
    ],
)
def test_adapters_exclude_what_divides_or_trains_the_weights_under_them(words: str, problems: Refused) -> None:
    assert refused("sft", words) == problems


def test_reinforcement_learning_draws_without_dropout() -> None:
    told = [("adapters.dropout_rl", "lora_dropout"), (SPLIT, "lora_dropout tp_size")]
    assert refused("rl", f"{DROPOUT} --tp_size 2") == told
    assert refused("rl", f"{LORA} --lora_dropout 0") == []
