"""`rft-train rollouts`: what is listed, compared and exported of a run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.library.run import Run
from rft_cli.commands.answers import listing
from rft_core.errors import RftError
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, write_token_records


class Tokenizer:
    """Decodes a token to its letter."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def record(sample: int, advantages: tuple[float, ...] | None) -> TokenRecord:
    return TokenRecord(
        prompt_id="train:0",
        sample=sample,
        prompt_ids=(0,),
        token_ids=(sample, 2),
        mask=(True, True),
        versions=(0, 0),
        engine_logprobs=(-1.0, -0.5),
        trainer_logprobs=(-0.75, -0.5),
        entropies=(0.5, 0.0),
        reference_logprobs=None,
        advantages=advantages,
        reward=float(sample),
        status="ok",
        finish_reason="stop",
    )


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two answers to a prompt, by its name."""
    path = Path("runs/first")
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 1\n")
    rows = [
        {"prompt_id": "train:0", "sample": n, "prompt": "x", "label": None, "response": "ab"[n], "reward": float(n)}
        | {"status": "ok", "finish_reason": "stop", "num_tokens": 2, "breakdown": {}}
        for n in range(2)
    ]
    (path / "rollouts/step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_token_records(token_file(path / "rollouts", 1), [record(0, (-1.0, -1.0)), record(1, (1.0, 1.0))])
    monkeypatch.setattr(Run, "tokenizer", lambda self: Tokenizer())
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert listing.run(list(words)) == 0
    return capsys.readouterr().out


def test_groups_are_listed_with_the_command_that_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "first")
    assert "train:0" in shown
    assert "rft-train rollouts first --prompt train:0" in shown


@pytest.mark.parametrize(
    ("quantity", "best"),
    [
        ("advantage", "b[+1]c[+1]"),
        ("entropy", "b[+0.5]c[+0]"),
        ("gap", "b[+0.25]c[+0]"),
        ("surprise", "b[+1]c[+0.5]"),
        ("none", "b"),
    ],
)
def test_answers_to_a_prompt_show_a_number_a_token(
    quantity: str, best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "first", "--prompt", "train:0", "--color", quantity)
    assert best in shown.replace("\u2502", "").split()


def test_a_step_without_records_says_why_nothing_is_coloured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token_file(run / "rollouts", 1).rename(token_file(run / "rollouts", 2))
    shown = printed(capsys, "first", "--prompt", "train:0")
    assert "has no record of the tokens of step 1" in shown


def test_answers_that_were_left_out_have_no_advantage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token_records(token_file(run / "rollouts", 1), [record(0, None), record(1, None)])
    assert "have no advantage: they were left out of the step" in printed(capsys, "first", "--prompt", "train:0")


def test_data_sets_of_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "d.jsonl: 1 rows of 1 groups" in printed(
        capsys, "first", "--export", "demonstrations", "--output", "d.jsonl"
    )
    assert json.loads(Path("d.jsonl").read_text())["output"] == "b"
    printed(capsys, "first", "--export", "pairs", "--output", "p.jsonl")
    pair = json.loads(Path("p.jsonl").read_text())
    assert (pair["chosen"], pair["rejected"], pair["margin"]) == ("b", "a", 1.0)


@pytest.fixture
def answers() -> Path:
    """A file as `rft-train eval --eval_n 2 --output` writes it."""
    path = Path("answers.jsonl")
    rows = [
        {"prompt_id": f"eval:{prompt}", "sample": n, "prompt": f"{prompt}?", "response": "ab"[n]}
        | {"reward": float(n == prompt), "status": "ok", "finish_reason": "stop", "num_tokens": 2}
        for prompt in range(2)
        for n in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_answers_stands_in_the_place_of_a_run(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rft-train rollouts answers.jsonl --prompt eval:0" in printed(capsys, "answers.jsonl")
    shown = printed(capsys, "answers.jsonl", "--prompt", "eval:1")
    assert "reward 1, 2 tokens" in shown
    assert "behind each token" not in shown
    printed(capsys, "answers.jsonl", "--export", "demonstrations", "--reward_min", "1", "--output", "d.jsonl")
    kept = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    assert [(row["input"], row["output"]) for row in kept] == [("0?", "a"), ("1?", "b")]
    printed(capsys, "answers.jsonl", "--export", "pairs", "--output", "p.jsonl")
    pairs = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [("a", "b"), ("b", "a")]


def test_a_file_in_which_an_answer_is_missing_is_refused(answers: Path) -> None:
    answers.write_text("".join(line + "\n" for line in answers.read_text().splitlines()[:-1]))
    with pytest.raises(RftError, match="eval:1#1 is missing"):
        listing.run(["answers.jsonl"])


def test_nothing_as_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "first", "--reward_min", "2") == "no kept answer is as asked\n"


@pytest.mark.parametrize(
    ("words", "do"),
    [
        (["first", "--export", "demonstrations"], "--output FILE.jsonl"),
        (["first", "--output", "x"], "--export demonstrations"),
        (["first", "--export", "demonstration", "--output", "x"], "--export demonstrations"),
        (["first", "--least_gap", "1"], "--export pairs"),
        (["first", "--per_prompt", "2", "--export", "pairs", "--output", "x"], "--export demonstrations"),
        (["first", "--sort", "rewards"], "--sort reward"),
        (["first", "--most", "0"], "--most 1"),
        (["first", "--reward_min", "nan"], "--reward_min 0.5"),
        (["frist"], "rft-train runs show first"),
        (["answers.jsonl", "--color", "gap"], "rft-train rollouts answers.jsonl"),
        (["answers.jsonl", "--step", "1"], "rft-train rollouts answers.jsonl"),
        (["absent.jsonl"], "rft-train eval --output absent.jsonl"),
        (["first", "--export", "pairs", "--least_gap", "1", "--output", "x"], "rft-train rollouts first"),
    ],
)
@pytest.mark.usefixtures("answers")
def test_what_is_refused_names_what_to_write(words: list[str], do: str) -> None:
    with pytest.raises(RftError) as caught:
        listing.run(words)
    assert caught.value.problem.do == do
    assert not Path("x").exists()
