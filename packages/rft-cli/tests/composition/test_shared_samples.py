"""Ranks that compute together: what goes with what, what a plan says of them, and models that cannot be cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.parallel.parallelize import is_sharded
from rft_cli.commands import plan
from rft_cli.config.resolve import resolve
from rft_cli.pages.run_plan_layout import strategy_line
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import DecoderSizes, TrainingMemoryConfig, estimate
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import run_dims, run_layout
from rft_models.files.divisibility import refuse_uneven

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "fixed"),
    [
        ("--tp_size 2 --fsdp --shard_size 2", "strategy.tp_fsdp", "--tp_size 2 --fsdp"),
        ("--tp_size 2 --fsdp --fsdp_cpu_offload", "strategy.tp_fsdp", "--tp_size 2 --fsdp --adam_offload"),
        ("--tp_size 2 --fsdp --meta_init", "strategy.tp_fsdp", "--tp_size 1 --fsdp --meta_init"),
        ("--tp_size 2 --zero_stage 2", "strategy.tp_blocks", "--tp_size 2 --fsdp"),
        ("--tp_size 2 --sp_size 2", "strategy.tp_sp", "--tp_size 2 --sp_size 1"),
        ("--tp_size 2 --engine_type hf", "strategy.hf", "--tp_size 2 --engine_type native"),
        ("--tp_size 2 --meta_init", "strategy.meta_whole", "--fsdp --meta_init"),
        ("--sp_mode ring", "strategy.sp_mode", "--sp_mode ring --sp_size 2"),
        ("--sp_mode ring --sp_size 2 --flash_attn", "strategy.ring_kernel", "--sp_mode ring --sp_size 2"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_loads(words: str, code: str, fixed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", *words.split()])
    assert code in {problem.code for problem in caught.value.problems}
    resolve("rl", ["--pretrain", "m", *fixed.split()])


@pytest.mark.parametrize(
    ("words", "sizes", "name"),
    [
        ("--tp_size 2 --use_mp_opt --adam_offload --gradient_checkpointing", (2, 1), "tp_size"),
        ("--sp_size 4 --sp_mode ulysses", (1, 4), "sp_size"),
    ],
)
def test_what_goes_together(words: str, sizes: tuple[int, int], name: str) -> None:
    found = resolve("rl", ["--pretrain", "m", *words.split()])
    assert (found.settings.strategy.tp_size, found.settings.strategy.sp_size) == sizes
    assert not any(name in note for note in found.notes)


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["sp_size", "tp_size"])
def test_groups_train_on_a_share_and_every_rank_generates(
    model: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--pretrain", str(model), "--world_size", "8", "--nodes", "2", f"--{kind}", "2"]
    words += ["--train_batch_size", "64", "--micro_train_batch_size", "4", "--micro_rollout_batch_size", "8"]
    words += ["--rollout_batch_size", "16", "--n_samples_per_prompt", "4"]
    told = planned(*words, capsys=capsys)
    assert (told["dp_size"], told[kind]) == (4, 2)
    assert told["batches"][0] == "train_batch_size 64 / 4 = 16 samples a rank = 4 micro-batches of 4"
    assert told["batches"][1] == (
        "rollout_batch_size 16 prompts / 8 = 2 a rank x 4 samples = 8, scored in 2 forwards of 8"
    )
    assert told["ranks"][1] == ([0, 1, 0] if kind == "sp_size" else [0, 0, 1])
    assert plan.run(words) == 0
    grid = "data 4 x sequence 2 x tensor 1" if kind == "sp_size" else "data 4 x sequence 1 x tensor 2"
    assert grid in capsys.readouterr().out


def test_heads_that_do_not_divide_are_refused_with_those_that_do(model: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        plan.run(["--pretrain", str(model), "--world_size", "3", "--tp_size", "3"])
    problem = caught.value.problem
    assert problem.code == "tensor.uneven"
    assert "num_key_value_heads 2, intermediate_size 40" in problem.what
    assert "allowed: 1, 2;" in problem.why
    assert problem.do.startswith("--tp_size 2, or --sp_size 3")
    refuse_uneven(CONFIG, 2, "m")


def test_matrices_in_parts_take_their_share_of_memory_and_norms_do_not() -> None:
    sizes = DecoderSizes(vocab=100, hidden=16, layers=2, query_width=16, kv_width=8, ffn=40, tied=False)

    def of(name: str, run: TrainingMemoryConfig) -> int:
        return next(term.num_bytes for term in estimate(sizes, run) if term.name == name)

    two = StrategySettings(tp_size=2)
    whole = TrainingMemoryConfig(micro_tokens=10)
    parts = TrainingMemoryConfig(micro_tokens=10, layout=run_layout(two, run_dims(two, 2)))
    assert of("parameters", parts) * 2 == of("parameters", whole)
    cut, kept = 4 * (4 * 16 + 5 * 8 + 5 * 40), 4 * 6 * 16 + 16 * 16
    assert of("activations", whole) == 10 * 2 * (cut + kept)
    assert of("activations", parts) == 10 * 2 * (cut // 2 + kept)


def test_the_start_says_who_computes_together() -> None:
    assert strategy_line(StrategySettings(), bf16=False) == "every rank holds all; gradients are summed once a step"
    parts = StrategySettings(tp_size=4)
    assert is_sharded(parts)
    assert "4 ranks hold parts of every matrix" in strategy_line(parts, bf16=False)
    assert strategy_line(StrategySettings(sp_size=2, sp_mode="ring"), bf16=False).endswith("sequence, by a ring")
    both = strategy_line(StrategySettings(tp_size=2, fsdp=True), bf16=False)
    assert "in blocks over the ranks that hold the same parts" in both
    assert "2 ranks hold parts of every matrix" in both
