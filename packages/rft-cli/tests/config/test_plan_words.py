"""The words of `rft-train plan`: its own options wherever they stand, and those of the command that it plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.planning import workload
from rft.planning.run_plan import PlanRequest
from rft_cli.commands import plan
from rft_cli.config import plan_words
from rft_core.errors import OptionsError


@pytest.mark.parametrize(
    ("text", "command", "numbers", "sharding", "as_json", "rest"),
    [
        ("", "rl", {}, "", False, ""),
        ("rl", "rl", {}, "", False, ""),
        ("sft --lr 1", "sft", {}, "", False, "--lr 1"),
        ("--lr 1 sft", "rl", {}, "", False, "--lr 1 sft"),
        ("--world_size 8 --nodes=2 --lr 1", "rl", {"world_size": 8, "nodes": 2}, "", False, "--lr 1"),
        ("--lr 1 --gpus-per-node 4 a --json", "rl", {"gpus_per_node": 4}, "", True, "--lr 1 a"),
        ("sft --gpu_memory 80 --sharding zero2", "sft", {"gpu_memory": 80}, "zero2", False, ""),
        ("--sharding=fsdp --json --sharding zero1", "rl", {}, "zero1", True, ""),
        ("world_size 8", "", {}, "", False, ""),
        ("rl world_size 8 --json_errors", "rl", {}, "", False, "world_size 8 --json_errors"),
    ],
)
def test_words_are_sorted_into_the_plan_and_the_command(
    text: str, command: str, numbers: dict[str, int], sharding: str, as_json: bool, rest: str
) -> None:
    if not command:
        with pytest.raises(OptionsError) as caught:
            plan_words.sort_words(text.split())
        assert caught.value.problem.code == "plan.unknown_command"
        return
    asked = plan_words.sort_words(text.split())
    assert (asked.command, asked.request) == (command, PlanRequest(numbers, sharding, traced=True))
    assert (asked.as_json, asked.words) == (as_json, rest.split())


@pytest.mark.parametrize("word", ["--by_formula", "--by-formula"])
def test_a_plan_by_formula_traces_nothing(word: str) -> None:
    asked = plan_words.sort_words(["sft", word, "--lr", "1"])
    assert (asked.request, asked.words) == (PlanRequest({}, ""), ["--lr", "1"])


@pytest.mark.parametrize(
    ("text", "numbers", "of_recipe"),
    [
        ("", {"nodes": 2, "gpus_per_node": 8, "gpu_memory": 79}, {"nodes", "gpus_per_node", "gpu_memory"}),
        ("--gpu_memory 40", {"nodes": 2, "gpus_per_node": 8, "gpu_memory": 40}, {"nodes", "gpus_per_node"}),
        ("--world_size 4", {"world_size": 4, "gpu_memory": 79}, {"gpu_memory"}),
    ],
)
@pytest.mark.parametrize("words", ["large", "mine.yaml", "sft --config large"])
def test_a_recipe_stands_for_its_command_and_says_its_machines(
    recipes: Path, words: str, text: str, numbers: dict[str, int], of_recipe: set[str]
) -> None:
    header = "recipe: {command: sft, nodes: 2, gpus_per_node: 8, gpu_memory: 79, hardware: two nodes}\n"
    for file in (recipes / "large.yaml", Path("mine.yaml")):
        file.write_text(header)
    asked = plan_words.sort_words(f"{words} {text} --lr 1".split())
    name = words.split()[-1]
    assert (asked.command, asked.request.numbers) == ("sft", numbers)
    assert asked.request.sources == dict.fromkeys(of_recipe, f"recipe {name.removesuffix('.yaml')}")
    assert asked.words == ["--config", name, "--lr", "1"]


def test_a_recipe_that_is_spelled_wrong_is_answered_with_the_nearest(recipes: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        plan_words.sort_words(["adition"])
    assert (caught.value.problem.code, caught.value.problem.do) == ("plan.unknown_command", "rft-train plan addition")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("eval", "plan.unknown_command"),
        ("--world_size two", "option.bad_value"),
        ("--world_size -2", "option.bad_value"),
        ("--world_size", "option.bad_value"),
        ("--nodes=", "option.bad_value"),
        ("--sharding zero9", "option.bad_value"),
    ],
)
def test_what_cannot_be_planned_is_refused(text: str, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        plan_words.sort_words(text.split())
    assert (caught.value.problem.code, caught.value.problem.do) == (code, "rft-train plan --help")


def test_a_plan_is_printed_as_lines_or_as_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        plan, "plan_run", lambda request, resolved, load: asked.append((request, resolved.values["seed"], load))
    )
    monkeypatch.setattr(plan, "lines", lambda planned: ["one", "two"])
    monkeypatch.setattr(plan, "as_object", lambda planned: {"a": 1})
    words = ["sft", "--pretrain", "m", "--seed", "7", "--nodes", "2"]
    assert plan.run(words) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert plan.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    assert asked == [(PlanRequest({"nodes": 2}, "", traced=True), 7, workload.SFT)] * 2


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["sft", "--help"]])
def test_help_plans_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train plan")
