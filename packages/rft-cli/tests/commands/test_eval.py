"""`rft-train eval` with a model in memory: sampled answers follow from the seed, greedy ones do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.process.machine import Machine
from rft.stages.evaluate import evaluate
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError, ServiceError, StorageError
from rft_dist.collectives import SingleProcess
from rft_dist.launch.environment import ranks_from_environment
from rft_models.tiny_models.text import build_character_model
from rft_trainer.evaluation import partial_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(
        tmp_path_factory.mktemp("model") / "m", hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seed=0
    )


def answers(model: Path, *words: str) -> list[str]:
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"input": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(4))
    )
    argv = ["--pretrain", str(model), "--eval_data", "rows.jsonl", "--generate_max_len", "8", "--prompt_max_len", "8"]
    resolved: Any = resolve("eval", [*argv, "--reward", "exact", *words])
    machine = Machine("cpu", ranks_from_environment({}), SingleProcess())
    evaluation = evaluate(resolved.settings, machine)
    assert len(evaluation.result.rewards) == len(evaluation.rows) == len(evaluation.prompts) == 4
    return [row["response"] for row in evaluation.flat_rows()]


def test_sampled_answers_follow_from_the_seed(model: Path) -> None:
    sampled = [answers(model, "--temperature", "1", "--seed", seed) for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    assert len(set(sampled[0])) > 1


def test_greedy_answers_are_the_same_under_any_seed(model: Path) -> None:
    assert answers(model, "--seed", "1") == answers(model, "--seed", "2")


def test_without_data_there_is_nothing_to_score(model: Path) -> None:
    resolved: Any = resolve("eval", ["--pretrain", str(model)])
    with pytest.raises(OptionsError) as caught:
        evaluate(resolved.settings, Machine("cpu", ranks_from_environment({}), SingleProcess()))
    assert caught.value.problem.code == "eval.no_data"


def test_an_evaluation_in_which_no_answer_has_a_reward_is_an_error_with_the_first_reason(model: Path) -> None:
    Path("reward.py").write_text("def words(responses, labels):\n    return 'no'\n")
    with pytest.raises(ServiceError) as caught:
        answers(model, "--reward", "reward.py:words", "--reward_workers", "1")
    assert caught.value.problem.code == "eval.no_scores"
    assert "words returned str" in caught.value.problem.where


def test_an_answer_is_sampled_as_often_as_asked_and_its_first_is_the_single_one(model: Path) -> None:
    single = answers(model, "--eval_temperature", "1")
    several = answers(model, "--eval_temperature", "1", "--eval_n", "3")
    assert len(several) == 12
    assert several[::3] == single


def test_columns_of_held_out_rows_go_by_the_names_of_training_commands_too(model: Path) -> None:
    assert answers(model, "--eval_input_key", "label") != answers(model)
    assert answers(model, "--eval_label_key", "input") == answers(model)


@pytest.mark.parametrize(("command", "flag"), [("eval", "temperature"), ("rl", "eval_temperature")])
def test_several_samples_at_temperature_0_are_refused(command: str, flag: str) -> None:
    words = ["--pretrain", "m", "--eval_data", "e", "--eval_n", "4"]
    with pytest.raises(SettingsError) as caught:
        resolve(command, words)
    (problem,) = caught.value.problems
    assert (problem.code, problem.do) == ("eval.equal_samples", f"--{flag} 1")
    resolve(command, [*words, *problem.do.split()])


@pytest.mark.parametrize(
    ("eval_k", "remedy"), [("8", "--eval_n 8"), ("0,2", "--eval_k 4"), ("two", "--eval_k 4"), ("1,16,2", "--eval_n 16")]
)
@pytest.mark.parametrize("command", ["eval", "rl"])
def test_more_draws_than_samples_are_refused_with_what_allows_them(command: str, eval_k: str, remedy: str) -> None:
    words = ["--pretrain", "m", "--eval_data", "e", "--eval_n", "4", "--eval_temperature", "1"]
    with pytest.raises(SettingsError) as caught:
        resolve(command, [*words, "--eval_k", eval_k])
    (problem,) = caught.value.problems
    assert (problem.code, problem.do) == ("eval.draws", remedy)
    resolve(command, [*words, "--eval_k", eval_k, *problem.do.split()])


@pytest.mark.parametrize("command", ["eval", "rl"])
def test_a_pick_among_one_response_is_refused_with_what_allows_it(command: str) -> None:
    words = ["--pretrain", "m", "--eval_data", "e", "--eval_temperature", "1", "--eval_pick", "helpful"]
    with pytest.raises(SettingsError) as caught:
        resolve(command, words)
    (problem,) = caught.value.problems
    assert problem.code == "eval.pick"
    resolve(command, [*words, *problem.do.split()])


def test_a_killed_evaluation_goes_on_where_it_was_and_its_file_is_that_of_one_that_was_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("reward.py").write_text(
        "import pathlib\n"
        "def some(responses, labels):\n"
        "    asked = pathlib.Path('asked')\n"
        "    seen = int(asked.read_text()) if asked.exists() else 0\n"
        "    asked.write_text(str(seen + len(responses)))\n"
        "    return [float(len(set(r)) % 2) for r in responses]\n"
    )
    monkeypatch.setattr(partial_rows, "_RESPONSES_AT_ONCE", 2)
    words = ("--reward", "reward.py:some", "--reward_workers", "1", "--temperature", "1")
    answers(model, *words, "--output", "whole.jsonl")
    keep, turns = partial_rows.PartialRows.keep, list[int]()

    def killed(self: Any, rows: Any) -> None:
        keep(self, rows)
        turns.append(len(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(partial_rows.PartialRows, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        answers(model, *words, "--output", "out.jsonl")
    assert turns == [2]
    assert Path("out.jsonl.partial").exists()
    assert not Path("out.jsonl").exists()

    def refused(self: Any, rows: Any) -> None:
        del self, rows
        raise StorageError(code="a.b", what="w", where="h", why="y", do="d")

    monkeypatch.setattr(partial_rows.PartialRows, "keep", refused)
    with pytest.raises(StorageError) as stopped:
        answers(model, *words, "--output", "out.jsonl")
    assert stopped.value.problem.state.endswith("out.jsonl.partial; the same command goes on with them")
    monkeypatch.setattr(partial_rows.PartialRows, "keep", keep)
    with pytest.raises(OptionsError) as caught:
        answers(model, *words, "--seed", "5", "--output", "out.jsonl")
    assert caught.value.problem.code == "eval.other_partial"
    Path("asked").unlink()
    answers(model, *words, "--output", "out.jsonl")
    assert Path("asked").read_text() == "2", "the first two have their rewards"
    assert Path("out.jsonl").read_text() == Path("whole.jsonl").read_text()
    assert not Path("out.jsonl.partial").exists()


def test_two_models_answer_the_same_rows_and_saved_rows_say_the_same(model: Path) -> None:
    Path("reward.py").write_text("def size(responses, labels):\n    return [len(set(r)) / 8 for r in responses]\n")
    other = build_character_model(Path("other"), hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seed=1)
    words = ("--reward", "reward.py:size", "--reward_workers", "1", "--temperature", "1")
    answers(other, *words, "--output", "other.json")
    for number, compared in enumerate((other, "other.json")):
        answers(model, *words, "--output", f"{number}.json", "--compare", str(compared))
    found = [json.loads(Path(f"{number}.json").read_text())["compare"] for number in range(2)]
    assert found[0].pop("with") != found[1].pop("with")
    assert found[0] == found[1]
    rewards = [[row["reward"] for row in json.loads(Path(f).read_text())["rows"]] for f in ("other.json", "0.json")]
    assert found[0]["reward"]["after"] - found[0]["reward"]["before"] == pytest.approx(
        sum(rewards[1]) / 4 - sum(rewards[0]) / 4
    )
