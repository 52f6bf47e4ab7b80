"""A step reward model as TRL writes it: tested on labelled steps, scoring responses of a run, and not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.compare import read_rows
from support.vision_task import write_rows

from rft_cli.main import main
from rft_models.tiny_models.text import build_character_tokenizer, build_decoder
from rft_models.tokenization.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a token classifier of two labels around its decoder, and labelled steps."""
    from transformers import AutoModelForTokenClassification

    folder = tmp_path_factory.mktemp("trl")
    tokenizer = build_character_tokenizer("0123456789+=\n")
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 24, "max_positions": 64}
    base = build_decoder(folder / "policy", tokenizer, **sizes, seed=2, init_std=0.3)
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=2, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, 32).view(2, 16))
    model.save_pretrained(folder / "prm")
    load_tokenizer(base).save_pretrained(folder / "prm")
    rows = [{"prompt": f"{n}+1=", "completions": ["1+1=2", f"{n}"], "labels": [True, n % 2 == 0]} for n in range(8)]
    write_rows(folder / "steps.jsonl", rows)
    write_rows(folder / "prompts.jsonl", [{"input": f"{n}+1="} for n in range(4)])
    return folder


def test_it_is_tested_on_labelled_steps_and_gives_responses_their_rewards(folder: Path, tmp_path: Path) -> None:
    prm, output = str(folder / "prm"), tmp_path / "out.jsonl"
    words = ["--model", prm, "--eval_data", str(folder / "steps.jsonl"), "--input_key", "prompt", "--device", "cpu"]
    assert main(["rm-test", *words, "--output", str(output)]) == 0
    probabilities = [row["probabilities"] for row in read_rows(output)]
    assert [len(row) for row in probabilities] == [2] * 8
    assert all(0 < one < 1 for row in probabilities for one in row)
    assert len({one for row in probabilities for one in row}) > 8

    run = tmp_path / "run"
    words = ["--pretrain", str(folder / "policy"), "--prompt_data", str(folder / "prompts.jsonl"), "--device", "cpu"]
    words += ["--rollout_batch_size", "2", "--n_samples_per_prompt", "4", "--train_batch_size", "8"]
    words += ["--generate_max_len", "4", "--prompt_max_len", "8", "--max_steps", "1", "--rollout_log_interval", "1"]
    assert main(["rl", *words, "--reward_pretrain", prm, "--save_path", str(run)]) == 0
    rows = read_rows(run / "rollouts" / "step_000001.jsonl")
    assert {row["status"] for row in rows} <= {"ok", "failed"}
    rewards = [row["reward"] for row in rows if row["status"] == "ok"]
    assert rewards
    assert all(0 < reward < 1 for reward in rewards)


def test_it_is_not_trained_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pretrain", str(folder / "prm"), "--prompt_data", str(folder / "steps.jsonl"), "--input_key", "prompt"]
    words += ["--loss_type", "steps", "--device", "cpu", "--save_path", str(tmp_path / "run"), "--json_errors"]
    assert main(["rm", *words]) == 2
    problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
    assert problem["code"] == "rm.token_classifier"
    assert not (tmp_path / "run").exists()
