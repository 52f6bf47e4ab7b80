"""GRPO from the command line with vLLM drawing the rollouts: the model learns, and the engine is never behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rft_cli.main import main

REWARD = '''
def sevens(responses, labels):
    """The share of sevens among eight characters."""
    return [response.count("7") / 8 for response in responses]
'''


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_policy_learns_from_rollouts_of_vllm(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = tmp_path / "run"
    words = ["rl", "--pretrain", model_dir, "--prompt_data", tmp_path / "prompts.jsonl", "--save_path", run]
    words += ["--reward", f"{tmp_path / 'reward.py'}:sevens", "--engine_type", "vllm", "--device", "cpu"]
    words += ["--rollout_batch_size", 16, "--n_samples_per_prompt", 8, "--train_batch_size", 128]
    words += ["--generate_max_len", 8, "--prompt_max_len", 16, "--num_episodes", 8]
    words += ["--actor_learning_rate", 1e-3, "--init_kl_coef", 0, "--save_steps", -1, "--lr_schedule", "constant"]
    assert main([str(word) for word in words]) == 0

    found = rows(run / "metrics.jsonl")
    assert len(found) == 8
    first, last = found[0]["reward/mean"], found[-1]["reward/mean"]
    assert last > first + 0.3, (first, last)
    # the engine's copy is that of the policy after every update, and its tokens are scored alike in every step
    assert max(row["engine/probe_gap"] for row in found) < 1e-3
    gaps = [row["policy/logprob_gap_max"] for row in found if "policy/logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-3
    log = next((run / "logs").glob("engine-*.log"))
    assert log.exists()
