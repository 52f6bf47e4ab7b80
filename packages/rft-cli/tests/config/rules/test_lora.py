"""Adapters in settings: what they do not go with, what has no effect, and their memory before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.decoder_sizes import model_sizes
from rft.planning.lora_memory import adapter_weights
from rft_cli.commands import plan
from rft_cli.config.resolve import resolve
from rft_dist.planning.memory_estimate import DecoderSizes, TrainingMemoryConfig, estimate
from rft_dist.strategies.registry import SHARDINGS, run_dims, run_layout
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.load import load_policy
from rft_models.settings import AdapterKind
from rft_models.tiny_models.text import build_character_model

LORA = ["--lora_rank", "8"]


@pytest.mark.parametrize(
    ("command", "argv", "code"),
    [
        ("rl", [*LORA, "--lora_dropout", "0.1"], "adapters.dropout_rl"),
        ("sft", [*LORA, "--lora_dropout", "0.1", "--fsdp"], "adapters.dropout_blocks"),
        ("sft", [*LORA, "--lora_dropout", "0.1", "--sp_size", "2"], "adapters.dropout_blocks"),
        ("sft", [*LORA, "--lora_dropout", "0.1", "--images_key", "image"], "adapters.dropout_images"),
        ("rl", [*LORA, "--freeze_prefix", "model.layers.0"], "adapters.frozen_too"),
        ("sft", [*LORA, "--train_only_tokens_from", "4"], "adapters.frozen_too"),
        ("sft", [*LORA, "--lora_dropout", "0.1", "--zero_stage", "1"], "adapters.dropout_blocks"),
        ("sft", [*LORA, "--lora_dropout", "0.1", "--tp_size", "2"], "adapters.dropout_blocks"),
        ("rl", [*LORA, "--ckpt_partial", "model", "--ckpt_path", "runs/a"], "adapters.partial"),
        ("rl", [*LORA, "--lora_type", "dora", "--tp_size", "2"], "adapters.tp_dora"),
        ("rl", [*LORA, "--fp16", "--zero_stage", "2"], "strategy.fp16_zero"),
        ("rl", [*LORA, "--load_in_4bit", "--fsdp"], "adapters.4bit_blocks"),
        ("rl", [*LORA, "--load_in_4bit", "--zero_stage", "2"], "adapters.4bit_blocks"),
        ("rl", [*LORA, "--load_in_4bit", "--tp_size", "2"], "adapters.4bit_blocks"),
        ("sft", ["--load_in_4bit"], "adapters.only_4bit"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_with_a_way_out(command: str, argv: list[str], code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(command, ["--pretrain", "m", *argv])
    problem = next(problem for problem in caught.value.problems if problem.code == code)
    assert "command line" in problem.where
    assert problem.do


@pytest.mark.parametrize(
    "words",
    [
        "--zero_stage 3 --zpg 2 --overlap_comm --adam_offload --gradient_checkpointing --lora_type dora",
        "--tp_size 2 --lora_type rslora",
        "--tp_size 2 --fsdp",
        "--fsdp --meta_init --enable_ema --fp16",
        "--zero_stage 1 --enable_ema --bf16",
    ],
)
def test_what_goes_with_adapters(words: str) -> None:
    for command in ("rl", "sft"):
        found = resolve(command, ["--pretrain", "m", *LORA, *words.split()])
        assert found.settings.adapter.lora_rank == 8
        # no adapter setting is said to have no effect
        assert not any("lora" in note for note in found.notes)


def test_a_supervised_run_may_drop_out_and_settings_without_a_rank_are_told() -> None:
    assert resolve("sft", ["--pretrain", "m", *LORA, "--lora_dropout", "0.1"]).settings.adapter.lora_dropout == 0.1
    (note,) = resolve("rl", ["--pretrain", "m", "--lora_alpha", "3"]).notes
    assert note.startswith("lora_alpha = 3")
    assert "lora_rank is 0" in note


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,down_proj", "self_attn.v_proj"])
def test_the_weights_of_adapters_are_those_that_are_made(targets: str, kind: AdapterKind, tmp_path: Path) -> None:
    path = build_character_model(tmp_path / "m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seed=0)
    values: dict[str, Any] = {"lora_rank": 3, "target_modules": targets, "lora_type": kind}
    rules = AdapterRules.of(3, 16.0, 0.0, targets, kind)
    assert rules is not None
    made = add_adapters(load_policy(path), rules, seed=0)
    assert adapter_weights(values, model_sizes(path)[0]) == (made.num_parameters, [])


def test_the_plan_counts_moments_of_adapters_alone_and_no_reference(tmp_path: Path) -> None:
    path = build_character_model(tmp_path / "m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seed=0)
    words = ["rl", "--pretrain", str(path), "--init_kl_coef", "0.1", "--nproc", "1"]
    [found, full] = [_plan([*words, *more]) for more in (LORA, [])]
    assert "reference model" in full["bytes"]
    assert "reference model" not in found["bytes"]
    assert found["bytes"]["parameters"] == full["bytes"]["parameters"]
    adapters = found["bytes"]["adapters"]
    assert adapters == 4 * adapter_weights(resolve("rl", words[1:3] + LORA).values, model_sizes(path)[0])[0]
    assert found["bytes"]["gradients"] == adapters
    assert found["bytes"]["Adam moments"] == 2 * adapters
    assert any("takes no memory" in note for note in found["notes"])


def test_moments_and_averages_of_adapters_are_spread_as_the_strategy_says() -> None:
    sizes = DecoderSizes(vocab=100, hidden=16, layers=2, query_width=16, kv_width=8, ffn=40, tied=False)

    def of(sharding: str) -> dict[str, int]:
        settings = SHARDINGS[sharding]
        layout = run_layout(settings, run_dims(settings, 2))
        run = TrainingMemoryConfig(layout=layout, adapter_weights=30, average=True)
        return {term.name: term.num_bytes for term in estimate(sizes, run)}

    names = ("parameters", "adapters", "gradients", "Adam moments", "moving average")
    whole = [4 * sizes.parameters, 120, 120, 240, 120]
    assert [of("replicated")[name] for name in names] == whole
    assert [of("zero1")[name] for name in names] == [*whole[:3], 120, 60]
    assert [of("zero2")[name] for name in names] == [*whole[:2], 60, 120, 60]
    assert [of("zero3")[name] for name in names] == [size // 2 for size in whole]


def _plan(words: list[str]) -> dict[str, Any]:
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert plan.run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(told.getvalue())
    return {"bytes": {term["name"]: term["num_bytes"] for term in found["memory"]}, "notes": found["notes"]}
