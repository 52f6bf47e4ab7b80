"""Distillation: a teacher whose token ids mean other texts is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_cli.main import main


def test_a_teacher_of_other_tokens_is_refused_before_its_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "rows.jsonl"
    texts.write_text(json.dumps({"prompt": "abc", "answer": "cba"}) + "\n")
    for name in ("student", "teacher"):
        words = ["build", "--texts", str(texts), "--hidden", "16", "--layers", "1", "--heads", "2"]
        assert main([*words, "--save_path", str(tmp_path / name)]) == 0
    file = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    (tmp_path / "teacher" / "model.safetensors").unlink()
    words = ["rl", "--pretrain", str(tmp_path / "student"), "--teacher_pretrain", str(tmp_path / "teacher")]
    assert main([*words, "--prompt_data", str(texts), "--save_path", str(tmp_path / "run")]) == 2
    assert "2 tokens have other ids than in the policy's tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
