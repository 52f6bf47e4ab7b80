"""Rejection sampling, best of n and a round of DPO: the commands of the page, run on sums that a model half knows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.setup import TinyTask

from rft_cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
[CHAIN] = [
    block
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    if block.startswith("rft-train eval")
]
COMMANDS = [shlex.split(line)[1:] for line in CHAIN.replace("\\\n", " ").splitlines()]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_commands_of_the_page_make_data_and_train_on_them(
    tmp_path: Path, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(task.model), "train.jsonl": str(task.folder / "train.jsonl")}
    places["heldout.jsonl"] = str(task.folder / "heldout.jsonl")
    for words in COMMANDS:
        # the number of the last step follows from the number of pairs
        for picker in Path("runs/picker/checkpoints").glob("step_*/model"):
            places["picker=runs/picker/checkpoints/step_000093/model"] = f"picker={picker}"
        more = ["--generate_max_len", "4"] if words[0] == "eval" else []
        assert main([places.get(word, word) for word in words] + more) == 0, words
    answers = read_rows(tmp_path / "answers.jsonl")
    prompts = {row["prompt"] for row in answers}
    assert len(answers) == 8 * len(prompts)
    right = read_rows(tmp_path / "right.jsonl")
    labels = {row["prompt"]: row["label"] for row in answers}
    assert right
    assert all(row["output"].strip() == labels[row["input"]] for row in right)
    solved = {row["prompt"] for row in answers if row["reward"] == 1.0}
    assert {row["input"] for row in right} == solved
    pairs = read_rows(tmp_path / "pairs.jsonl")
    assert {row["prompt"] for row in pairs} == {
        row["prompt"] for row in answers if row["reward"] == 0.0 and row["prompt"] in solved
    }
    assert all(row["chosen"].strip() == labels[row["prompt"]] != row["rejected"].strip() for row in pairs)
    picked = json.loads((tmp_path / "picked.json").read_text())
    metrics = picked["metrics"]
    assert {f"eval/{name}@8" for name in ("pass", "maj", "picked")} <= metrics.keys()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in picked["rows"]:
        groups.setdefault(row["prompt_id"], []).append(row)
    # of all eight responses the reward model's favourite, by the numbers in the file
    expected = [max(group, key=lambda row: row["breakdown"]["picker"])["correct"] for group in groups.values()]
    assert metrics["eval/picked@8"] == pytest.approx(sum(expected) / len(expected))
    assert metrics["eval/maj@8"] <= metrics["eval/pass@8"] >= metrics["eval/picked@8"]
