"""`rft-train conformance` with the real vLLM: its copy of the weights says what the trainer says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_cli.main import main


def test_vllm_and_native_agree_with_the_trainer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["conformance", "--model", model_dir, "--engines", "native,vllm", "--device", "cpu"]
    words += ["--generate_max_len", 12, "--n_samples_per_prompt", 3, "--json", tmp_path / "all.json"]
    assert main([str(word) for word in words]) == 0
    native, vllm = json.loads((tmp_path / "all.json").read_text())["engines"]
    for engine in (native, vllm):
        assert (engine["state"], engine["verdict"]) == ("measured", "equal")
        assert max(draw["gap"]["largest"] for draw in engine["draws"]) < 1e-4
        masses = [draw["kept_mass"]["largest"] for draw in engine["draws"] if draw["top_p"] < 1]
        assert len(masses) == 2
        assert max(masses) < 1e-4
        assert [draw["tokens_outside"] for draw in engine["draws"]] == [0] * 4
    assert [draw["samples_as_native"] for draw in vllm["draws"]] == [3] * 4
    assert "verdict  equal: native, vllm" in capsys.readouterr().out
