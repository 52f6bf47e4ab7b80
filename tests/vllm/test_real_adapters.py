"""GRPO with adapters and vLLM: it is sent the adapters alone, adds them itself, and is never behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main

REWARD = '''
def sevens(responses, labels):
    """The share of sevens among eight characters."""
    return [response.count("7") / 8 for response in responses]
'''


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_vllm_serves_the_adapters_of_every_step(kind: str, model_dir: Path, tmp_path: Path) -> None:
    assert importlib.util.find_spec("peft"), "this environment has no peft: uv sync --extra lora"
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = tmp_path / "run"
    words = ["rl", "--pretrain", model_dir, "--prompt_data", tmp_path / "prompts.jsonl", "--save_path", run]
    words += ["--reward", f"{tmp_path / 'reward.py'}:sevens", "--engine_type", "vllm", "--device", "cpu"]
    words += ["--rollout_batch_size", 16, "--n_samples_per_prompt", 8, "--train_batch_size", 128]
    words += ["--generate_max_len", 8, "--prompt_max_len", 16, "--num_episodes", 6, "--lora_type", kind]
    words += ["--actor_learning_rate", 1e-2, "--init_kl_coef", 0, "--save_steps", -1, "--lr_schedule", "constant"]
    assert main([str(word) for word in [*words, "--lora_rank", 6]]) == 0

    found = rows(run / "metrics.jsonl")
    first, last = found[0]["reward/mean"], found[-1]["reward/mean"]
    assert last > first + 0.15, (first, last)
    # vLLM adds LoRA and rsLoRA itself; of DoRA it has the folded weights
    assert max(row["engine/probe_gap"] for row in found) < 1e-3
    gaps = [row["policy/logprob_gap_max"] for row in found if "policy/logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-3
