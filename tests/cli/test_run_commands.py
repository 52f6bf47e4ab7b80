"""What is done with a finished run: score it again, answer with it, look at it, go on from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import ForkServer

import rft

FILES = ("one.jsonl", "two.jsonl")


@pytest.fixture(scope="module")
def runs_of(
    base_words: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory, call: Callable[..., Any]
) -> Callable[[str], Path]:
    """A finished run with these further flags."""
    known: dict[str, Path] = {}

    def made(words: str) -> Path:
        if words not in known:
            known[words] = tmp_path_factory.mktemp("runs") / "run"
            ended = call("rl", *base_words["rl"], "--save_path", known[words], *words.split())
            assert ended.code == 0, ended.err
        return known[words]

    return made


VARIANTS = [
    "",
    "--max_len 12 --prompt_max_len 9",
    "--apply_chat_template --system_prompt add",
    "--temperature 0.7 --top_p 0.9",
    "--max_eval_samples 2 --input_template q{}",
    "--reward gsm8k",
]


@pytest.mark.parametrize("words", VARIANTS)
def test_eval_of_a_run_gives_the_figures_that_the_run_ended_with(
    words: str, runs_of: Callable[[str], Path], rft_train: Callable[..., Any]
) -> None:
    run = runs_of(words)
    outcome = rft_train("eval", run)
    assert outcome.code == 0, outcome.err
    after = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])
    measured = {name: value for name, value in after.items() if name.startswith("eval/")}
    assert after["name"] == "after"
    assert json.loads(outcome.out.splitlines()[-1]) == measured


def test_eval_writes_one_line_a_prompt(runs_of: Callable[[str], Path], rft_train: Callable[..., Any]) -> None:
    outcome = rft_train("eval", runs_of(""), "--output", "answers.jsonl", "--max_eval_samples", "3")
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert outcome.code == 0
    assert len(rows) == 3
    assert {"prompt", "response", "label", "reward", "status", "finish_reason"} <= set(rows[0])


def test_generate_answers_with_the_weights_of_a_run(
    runs_of: Callable[[str], Path], rft_train: Callable[..., Any]
) -> None:
    words = ["--prompt", "12+12=", "--temperature", "0", "--output", "one.jsonl"]
    assert rft_train("generate", runs_of(""), *words).code == 0
    answer = json.loads(Path("one.jsonl").read_text())["response"]
    model = runs_of("") / "checkpoints" / "step_000003" / "model"
    assert rft_train("generate", "--pretrain", model, *words, "--generate_max_len", "12").code == 0
    assert json.loads(Path("one.jsonl").read_text())["response"] == answer


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_two_ranks_write_the_rows_of_one(
    command: str, runs_of: Callable[[str], Path], rft_train: Callable[..., Any], server: ForkServer
) -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps({"input": f"{n}+1="}) + "\n" for n in range(3)))
    prompts = ["--prompt_data", str(Path("prompts.jsonl").absolute())] if command == "generate" else []
    words = [command, str(runs_of("")), *prompts, "--temperature", "1"]
    assert rft_train(*words, "--output", "one.jsonl").code == 0
    server.must_finish(*words, "--output", str(Path("two.jsonl").absolute()), num_ranks=2)
    one, two = ([json.loads(line) for line in Path(name).read_text().splitlines()] for name in FILES)
    assert len(one) >= 3
    assert [row["response"] for row in two] == [row["response"] for row in one]


def test_a_run_is_listed_and_shown(runs_of: Callable[[str], Path], rft_train: Callable[..., Any]) -> None:
    run = runs_of("")
    assert "run " in rft_train("runs", run.parent).out
    page = rft_train("runs", "show", run).out
    assert re.search(r"^run  finished", page, flags=re.M)
    assert "reward/mean" in page
    assert "step_000003" in page


RECORDED = "--rollout_log_interval 1 --num_trajectories_to_save 4"


def test_tokens_of_a_run_are_recorded_and_shown(
    runs_of: Callable[[str], Path], rft_train: Callable[..., Any], server: ForkServer, base_words: dict[str, list[str]]
) -> None:
    run = runs_of(RECORDED)
    records = rft.Run(run).tokens()
    assert len(records) == 4
    rows = [row for row in rft.Run(run).samples if row["step"] == 3]
    assert [(one.prompt_id, one.sample) for one in records] == [(row["prompt_id"], row["sample"]) for row in rows]
    for one in records:
        assert one.trainer_logprobs == pytest.approx(one.engine_logprobs, abs=1e-5), "one model in one process"
        assert one.entropies is not None
        assert one.advantages is not None
        assert min(one.entropies) >= -1e-6
        assert set(one.versions) == {2}
    listed = rft_train("rollouts", run)
    assert listed.code == 0
    page = rft_train("rollouts", run, "--prompt", records[0].prompt_id, "--step", "3").out
    assert "best: " in page
    assert "behind each token: its advantage" in page
    # two ranks record what one does, and a run without records has the same weights
    both = Path("both").absolute()
    words = [*base_words["rl"], "--save_path", str(both), *RECORDED.split()]
    server.must_finish("rl", *words, num_ranks=2)
    for one, two in zip(records, rft.Run(both).tokens(), strict=True):
        assert (one.token_ids, one.sample) == (two.token_ids, two.sample)
        assert two.trainer_logprobs == pytest.approx(one.trainer_logprobs, abs=1e-4)
    without = runs_of(f"{RECORDED} --token_records off")
    assert not list(without.glob("rollouts/tokens_*"))
    name = "checkpoints/step_000003/model/model.safetensors"
    assert (run / name).read_bytes() == (without / name).read_bytes()


def test_a_run_goes_on_with_more_steps_as_if_it_had_them_from_the_start(
    base_words: dict[str, list[str]], rft_train: Callable[..., Any]
) -> None:
    words = [*base_words["rl"], "--num_episodes", "2"]
    assert rft_train("rl", *words, "--save_path", "whole", "--max_steps", "5").code == 0
    assert rft_train("rl", *words, "--save_path", "parts", "--max_steps", "2").code == 0
    resumed = rft_train("resume", "parts", "--max_steps", "5")
    assert resumed.code == 0, resumed.err
    assert "has no effect" not in resumed.out
    for name in ("checkpoints/step_000005/model/model.safetensors", "checkpoints/step_000005/state/ledger.json"):
        assert Path("whole", name).read_bytes() == Path("parts", name).read_bytes()


def test_the_configuration_of_a_run_starts_an_equal_run(
    runs_of: Callable[[str], Path], rft_train: Callable[..., Any]
) -> None:
    run = runs_of("")
    assert rft_train("rl", "--config", run, "--save_path", "again").code == 0
    name = "checkpoints/step_000003/model/model.safetensors"
    assert (run / name).read_bytes() == Path("again", name).read_bytes()
