"""The examples in the READMEs of the packages run as they stand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import rft
from rft_cli.config.resolve import resolve
from rft_models.tiny_models.text import build_character_model
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.in_process import FunctionReward
from rft_trainer.rewards.registry import reward_by_name

ROOT = Path(__file__).parents[2]
TOLD = {
    "rft-trainer": ["234 optimizer steps", "1.0 ok", "None unparsable"],
    "rft-cli": ["64 recipe", "7 command line", "exit code 2"],
}


@pytest.mark.parametrize("package", TOLD)
def test_the_example_of_a_package_runs(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.excepthook", None)
    readme = (ROOT / "packages" / package / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    exec(compile(example, f"{package}/README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert [part for part in TOLD[package] if part not in shown] == []


def test_the_reward_of_the_examples_scores_as_it_says() -> None:
    scope: dict[str, object] = {}
    path = ROOT / "examples" / "my_reward.py"
    exec(compile(path.read_text(), str(path), "exec"), scope)
    reward, finished = scope["reward_fn"], scope["finished_only"]
    assert callable(reward)
    assert callable(finished)
    assert reward(["42", "it is 42", "7"], ["42", "42", "42"]) == pytest.approx([1.0, 0.4, 0.0])
    assert finished(["42", "42"], ["42", "42"], finish_reasons=["stop", "length"]) == [1.0, None]


def test_every_function_on_the_page_of_rewards_scores_the_row_that_it_is_about() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (row,) = (json.loads(text) for text in re.findall(r"With rows `(\{.*\})`", page))
    scope: dict[str, object] = {}
    exec(compile(source, "docs/rewards.md", "exec"), scope)
    functions = {name: value for name, value in scope.items() if callable(value)}
    assert set(functions) == {"reward_fn", "one_response", "trl_reward", "compute_score", "asked"}
    item = RewardItem("rows:0", row["input"], "dcba", row["label"], "stop", 1, columns=row)
    for name, function in functions.items():
        reward = FunctionReward(function)
        reward.bind_columns(dict.fromkeys(row, ""))
        right, wrong = reward([item, replace(item, response_text="abcd")])
        assert (right.value, wrong.value) == (3.0 if name == "one_response" else 1.0, 0.0), name
        assert dict(right.breakdown) == ({"length": 4.0} if name == "compute_score" else {})


def test_every_example_of_a_rule_on_the_page_of_rewards_has_its_reward() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    table = page.partition("| rule | settings | label | response | reward |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    seen: set[str] = set()
    for name, settings, label, response, value in rows:
        given = dict(text.split("=", 1) for text in re.findall(r"`([^`]*)`", settings))
        words = ["--pretrain", "m", "--reward", name.strip("`")]
        for setting, text in given.items():
            words += [f"--{setting}", *text.split(",")]
        chosen = resolve("eval", words).settings.reward
        options = {setting: getattr(chosen, setting) for setting in given}
        reward = reward_by_name(chosen.reward, options=options)
        try:
            [score] = reward([RewardItem("p", "?", response.strip("`"), label.strip("`") or None, "stop", 1)])
        finally:
            reward.close()
        assert score.value == pytest.approx(float(value), abs=1e-6), (name, settings, response)
        seen.add(chosen.reward)
    assert len(rows) == 17
    assert seen == set(["numeric", "fuzzy", "choice", "format", "regex", "length", "language", "json_schema"])


def test_the_page_of_runs_in_python_reads_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "metrics.jsonl": [{"step": step, "reward/mean": step / 60} for step in range(1, 61)],
        "evals.jsonl": [{"step": 0, "eval/accuracy": 0.0}, {"step": 60, "eval/accuracy": 0.5}],
        "rollouts/step_000060.jsonl": [{"response": "ab", "reward": 0}, {"response": "ba", "reward": 1}],
        "summary.json": [{"outcome": "finished"}],
    }
    for name, lines in rows.items():
        file = tmp_path / "runs" / "reversal" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    (source,) = (part for part in blocks("docs/python.md") if "run.metrics" in part)
    scope: dict[str, object] = {}
    exec(compile(source, "docs/python.md", "exec"), scope)
    assert capsys.readouterr().out.splitlines() == ["finished 60", "1.0", "[0.0, 0.5]"]
    assert scope["wrong"] == ["ab"]


SMALL = """device="cpu", rollout_batch_size=4, n_samples_per_prompt=2, train_batch_size=8, generate_max_len=4,
    prompt_max_len=8, lr_warmup_ratio=0.0"""


def blocks(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def test_runs_are_made_and_continued_as_the_pages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    model = build_character_model("model", hidden=16, layers=1, heads=2, ffn=16, max_positions=64)
    first, again = blocks("docs/python.md")[:2]
    shown = [part for part in blocks("README.md") if "rft.grpo" in part]
    scope: dict[str, object] = {}
    for source in [
        first.replace("max_steps=20", f"max_steps=2, {SMALL}"),
        again.replace("max_steps=30", "max_steps=3"),
    ]:
        assert "max_steps=2, " in source or "max_steps=3" in source
        exec(compile(source.replace('"MODEL"', repr(str(model))), "docs/python.md", "exec"), scope)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("finished [")
    assert rft.Run("runs/doubles").step == 3
    (source,) = shown
    source = source.replace('"MODEL"', repr(str(model))).replace("], reward)", f"], reward, max_steps=1, {SMALL})")
    exec(compile(source, "README.md", "exec"), scope)
    assert getattr(scope["run"], "outcome", "") == "finished"
