"""The quickstart learns: a short one improves on held-out problems, its control does not, and `eval` agrees with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rft_cli.main import main
from rft_trainer.runs.reader import read_run

pytestmark = pytest.mark.xdist_group("quickstart")

STEPS = 100
"""Of 600: enough to see it learn with any order of sums. The learning rate falls over these steps, so that the last
weights are settled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command as a person gives it, only shorter."""
    path = tmp_path_factory.mktemp("quickstart")
    assert main(["quickstart", "--seed", "0", "--steps", str(STEPS), "--save_path", str(path / "run")]) == 0
    return path


def test_held_out_accuracy_rises(folder: Path) -> None:
    run = read_run(folder / "run")
    before, after = run.accuracy("before"), run.accuracy("after")
    assert before is not None
    assert after is not None
    assert 0.3 <= before <= 0.65
    assert after >= before + 0.1
    assert run.summary["outcome"] == "finished"
    assert run.step == STEPS


def test_no_held_out_problem_or_its_twin_is_trained_on(folder: Path) -> None:
    rows = {}
    for name in ("train", "heldout"):
        lines = (folder / "run" / "data" / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line)["input"] for line in lines]
    twins = {f"{b}+{a}=" for a, b in (re.fullmatch(r"(\d\d)\+(\d\d)=", text).groups() for text in rows["heldout"])}  # pyright: ignore
    assert len(rows["heldout"]) == len(set(rows["heldout"])) == 500
    assert not set(rows["train"]) & (set(rows["heldout"]) | twins)
    assert len(set(rows["train"]) | set(rows["heldout"])) >= 8000


def test_eval_of_the_saved_checkpoint_gives_the_figures_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(folder / "run")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    final = read_run(folder / "run").summary["eval"]["after"]
    assert {f"eval/{name}": value for name, value in final.items() if name != "step"} == printed


def test_rewards_shuffled_within_groups_do_not_teach(folder: Path) -> None:
    run = folder / "run"
    warm = sorted((run / "warm_start" / "checkpoints").glob("step_*/model"))[-1]
    words = ["--config", "quickstart", "--pretrain", str(warm), "--prompt_data", str(run / "data" / "train.jsonl")]
    words += ["--eval_data", str(run / "data" / "heldout.jsonl"), "--seed", "0", "--max_steps", "30"]
    assert main(["rl", *words, "--shuffle_rewards", "--save_path", str(folder / "control")]) == 0
    control = read_run(folder / "control")
    before, after = control.accuracy("before"), control.accuracy("after")
    assert before is not None
    assert after is not None
    assert after <= before + 0.05


def test_the_run_directory_holds_what_it_promises(folder: Path) -> None:
    run = folder / "run"
    for name in (
        "config.yaml",
        "recipe.yaml",
        "command.txt",
        "env.json",
        "summary.json",
        "metrics.jsonl",
        "evals.jsonl",
    ):
        assert (run / name).is_file(), name
    model = sorted((run / "checkpoints").glob("step_*/model"))[-1]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (model / name).is_file(), name
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward/mean", "policy/kl", "time/rollout", "time/samples_per_minute"} <= set(row)
