"""What a person reads of the model before a run starts, and what frozen weights are after it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_models.policy.causal_policy import CausalPolicy

Call = Callable[..., Any]
FIRST = 20
"""The first token that is trained where only some are."""


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return importlib.import_module("safetensors.torch").load_file(directory / "model.safetensors")


def last(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2])) / "model"


def plan(outcome: Any, title: str) -> list[str]:
    """The lines of one group of the plan."""
    lines = outcome.out.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(f"{title} ")), None)
    if start is None:
        return []
    end = next((n for n in range(start + 1, len(lines)) if not lines[n].startswith(" " * 13)), len(lines))
    return [line[13:] for line in lines[start:end]]


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_what_is_frozen_is_listed_and_keeps_its_bits_with_weight_decay(
    command: str, bench: Any, base_words: dict[str, list[str]], rft_train: Call
) -> None:
    rate = ["--actor_learning_rate" if command == "rl" else "--learning_rate", "1e-2"]
    words = [*base_words[command], "--pretrain", bench.deep, *rate, "--l2", "0.5", "--save_path", "run"]
    words += ["--freeze_prefix", "model.embed_tokens,model.layers.0.mlp", "--gradient_checkpointing"]
    outcome = rft_train(command, *words)
    assert outcome.code == 0, outcome.err
    before, after = tensors(bench.deep), tensors(last(Path("run")))
    frozen = {n for n in before if n.startswith(("model.embed_tokens", "model.layers.0.mlp"))}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    counts = {name: before[name].numel() for name in frozen}
    trained = sum(tensor.numel() for tensor in before.values()) - sum(counts.values())
    told = plan(outcome, "frozen")
    assert told[0].startswith(f"{trained:,} of ")
    assert f"model.layers.0.mlp.up_proj.weight ({counts['model.layers.0.mlp.up_proj.weight']})" in told
    assert len(told) == 1 + len(frozen)
    assert plan(outcome, "memory") == ["gradient checkpointing full: every layer (all again)"]


def test_only_new_rows_are_trained_and_a_resumed_run_goes_on_with_them(
    bench: Any, base_words: dict[str, list[str]], rft_train: Call
) -> None:
    words = [*base_words["sft"], "--l2", "0.5", "--train_only_tokens_from", FIRST]
    outcome = rft_train("sft", *words, "--save_path", "whole")
    assert outcome.code == 0, outcome.err
    before, after = tensors(bench.model), tensors(last(Path("whole")))
    matrix = "model.embed_tokens.weight"
    assert {name for name in before if not torch.equal(before[name], after[name])} == {matrix}
    assert torch.equal(after[matrix][:FIRST], before[matrix][:FIRST])
    assert (after[matrix][FIRST:] != before[matrix][FIRST:]).any(1).all()
    assert f"{matrix} rows 0 to {FIRST - 1}" in plan(outcome, "frozen")[1]
    assert rft_train("sft", *words, "--save_path", "part", "--max_steps", "2").code == 0
    assert rft_train("resume", "part", "--max_steps", "3").code == 0
    resumed = tensors(last(Path("part")))
    assert all(torch.equal(resumed[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--freeze_prefix embed_tokens", "freezing.no_such_parameter", "--freeze_prefix model.embed_tokens"),
        ("--freeze_prefix", "freezing.no_such_parameter", "--freeze_prefix model"),
        ("--freeze_prefix model", "freezing.nothing_trained", "--freeze_prefix with fewer names"),
        ("--train_only_tokens_from 100000", "freezing.no_new_tokens", "first new token"),
        ("--train_only_tokens_from 3 --freeze_prefix model.norm", "freezing.two_ways", "--train_only_tokens_from 3"),
        ("--freeze_prefix model.norm --lr_factors model.norm=2", "optimizer.no_such_parameter", "--lr_factors"),
        ("--freeze_prefix model.norm --lr_factors *=0", "optimizer.nothing_trained", "--lr_factors"),
        ("--train_only_tokens_from 3 --l2_factors model.layers=0.5", "optimizer.no_such_parameter", "--l2_factors"),
        ("--aux_loss_coef 0.1", "router.none", "leave aux_loss_coef out"),
        ("--model_code absent.py", "models.model_code", "--model_code FILE.py"),
        ("--freeze_LLM", "option.refused", "--train_only_tokens_from N"),
    ],
)
@pytest.mark.parametrize("command", ["rl", "sft", "check"])
def test_what_cannot_be_is_refused_before_anything_is_written(
    command: str, words: str, code: str, told: str, base_words: dict[str, list[str]], rft_train: Call
) -> None:
    first = ["check", "sft"] if command == "check" else [command]
    outcome = rft_train(*first, *base_words[first[-1]], *words.split(), "--save_path", "run", "--json_errors")
    assert outcome.code == 2, outcome.err
    assert outcome.problem["code"] == code
    assert told in outcome.problem["do"]
    assert not Path("run").exists()


def test_the_plan_says_what_the_model_is_computed_with(
    bench: Any, base_words: dict[str, list[str]], rft_train: Call
) -> None:
    words = base_words["sft"]
    plain = rft_train("check", "sft", *words)
    assert plan(plain, "attention") == ["torch's fused attention on blocks of similar length, exact"]
    assert "torch thread each (" in plan(plain, "machine")[0]
    for title in ("weights", "memory", "frozen", "routers"):
        assert plan(plain, title) == []
    asked = rft_train(
        *("check", "sft", *words, "--flash_attn", "--bf16", "--gradient_checkpointing"),
        *("--gradient_checkpointing_mode", "selective", "--gradient_checkpointing_every", "2"),
        *("--aux_loss_coef", "0.01", "--pretrain", bench.experts),
    )
    assert asked.code == 0, asked.err
    assert plan(asked, "attention")[0].endswith("flash attention runs on CUDA, the device is cpu")
    assert "bfloat16" in plan(asked, "weights")[1]
    assert plan(asked, "memory")[0].startswith("gradient checkpointing selective: one layer in 2")
    assert plan(asked, "routers")[0].startswith("0.01 x load-balancing loss of 4 experts, 2 a token")


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_the_routers_loss_does_not_depend_on_the_cut(
    command: str, bench: Any, base_words: dict[str, list[str]], rft_train: Call
) -> None:
    rows = []
    for size in ("1", "3", "100"):
        words = [*base_words[command], "--pretrain", bench.experts, "--aux_loss_coef", "0.5", "--max_steps", "1"]
        outcome = rft_train(command, *words, "--micro_train_batch_size", size, "--save_path", f"cut_{size}")
        assert outcome.code == 0, outcome.err
        rows.append(json.loads((Path(f"cut_{size}") / "metrics.jsonl").read_text().splitlines()[0]))
    loss = "policy/loss" if command == "rl" else "sft/loss"
    for row in rows[1:]:
        for name in ("router/balance", "router/max_load", loss, "policy/gradient_norm"):
            assert row[name] == pytest.approx(rows[0][name], rel=1e-5, abs=1e-6), name
    assert 1.9 < rows[0]["router/balance"] < 8
    assert rows[0]["policy/micro_batches"] > rows[1]["policy/micro_batches"] > rows[2]["policy/micro_batches"] == 1


@pytest.mark.parametrize("command", ["rl", "dpo"])
def test_loads_of_experts_are_metrics_without_a_flag_and_change_no_bit_of_the_weights(
    command: str, bench: Any, base_words: dict[str, list[str]], rft_train: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*base_words[command], "--pretrain", bench.experts, "--micro_train_batch_size", "3"]
    weights, rows = [], []
    for name in ("watched", "not"):
        if name == "not":
            monkeypatch.setattr(CausalPolicy, "has_known_routers", False)
        outcome = rft_train(command, *words, "--save_path", name)
        assert outcome.code == 0, outcome.err
        weights.append(tensors(last(Path(name))))
        rows.append([json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    loads = ("router/entropy", "router/entropy_layer_0", "router/max_violation_layer_0", "router/dead_experts")
    for row, plain in zip(*rows, strict=True):
        assert all(name in row for name in (*loads, "router/z_loss", "router/max_logit"))
        assert not any("router" in name for name in plain)
        names = ("policy/loss", "policy/gradient_norm", "policy/weight_change", "dpo/loss")
        assert all(row[name] == plain[name] for name in names if name in plain)
    # an engine that shares the weights, in float32: of the first of every ten steps
    agreed = [row.get("engine/router_agreement") for row in rows[0]]
    assert agreed == [1.0 if command == "rl" and number == 0 else None for number in range(3)]
