"""The test of a reward model by itself: what it says, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_cli.commands.rm_test import run as main
from rft_core.errors import DataError, PreflightError, RftError
from rft_models.reward_model.loading import new_reward_model
from rft_models.reward_model.spec import RewardSpec
from rft_models.tiny_models.text import build_character_model

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, and one whose head is zero."""
    root = tmp_path_factory.mktemp("probe")
    plain = build_character_model(root / "plain", hidden=16, layers=1, heads=2, ffn=16, init_std=0.3)
    model = new_reward_model(plain, RewardSpec(), seed=1)
    model.save_pretrained(root / "rm")
    torch.nn.init.zeros_(model.head.score.weight)
    model.save_pretrained(root / "flat")
    return root


def test_a_model_is_scored_on_pairs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(folder / "rm")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["pairs"] == 6
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "1+1=", "chosen": "3", "rejected": "2"}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    assert main(["--model", str(folder / "rm"), "--pairs", str(file)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prefers_chosen"] == 0.5, "one order is right, the other is not"
    assert report["mean_margin"] == pytest.approx(0.0, abs=1e-6)
    assert report["difference_alone"] < 1e-5


def test_what_cannot_be_trained_on_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"all 12.*are 0") as caught:
        main(["--model", str(folder / "flat")])
    assert caught.value.problem.code == "reward.model_unfit"
    with pytest.raises(RftError, match="pretrain"):
        main(["--pairs", "x"])
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+1=", "chosen": "2"}\n')
    with pytest.raises(DataError) as caught:
        main(["--model", str(folder / "rm"), "--pairs", str(file)])
    assert caught.value.problem.where.startswith(f"{file}:2")
    file.write_text('{"prompt": "1+1=", "chosen": "two", "rejected": "3"}\n')
    with pytest.raises(PreflightError) as caught:
        main(["--model", str(folder / "rm"), "--pairs", str(file)])
    assert caught.value.problem.code == "reward.model_unfit"


def test_the_label_of_a_row_says_which_is_better_and_rows_are_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows = [row | {"better": word} for word in ("A", "B", "C", None)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    words = ["--model", str(folder / "rm"), "--pairs", str(file), "--outcome_key", "better", "--output", str(output)]
    assert main([*words, "--agree_with", str(folder / "rm")]) == 0
    printed = capsys.readouterr().out
    assert "in 1 of 2 pairs" in printed, "one of the two decided ones is the wrong way round"
    assert json.loads(printed.splitlines()[-1])["agreement"] == 1.0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["outcome"] for one in written] == [1.0, -1.0, 0.0, 2.0]
    first = written[0]["reward_chosen"]
    assert all(one["reward_chosen"] == pytest.approx(first, abs=1e-5) for one in written)


def test_pairs_of_which_none_is_decided_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3", "better": "tie"}) + "\n")
    with pytest.raises(DataError) as caught:
        main(["--model", str(folder / "rm"), "--pairs", str(file), "--outcome_key", "better"])
    assert caught.value.problem.code == "data.no_decided_pair"


def test_the_example_is_that_command(folder: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "test_reward_model.py"), "--model", str(folder / "flat")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "equal rewards teach nothing" in done.stderr
