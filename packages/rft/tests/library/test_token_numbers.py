"""Numbers of tokens beside their texts, and why there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.library.run import Run
from rft.library.token_numbers import group_tokens
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, write_token_records


class Tokenizer:
    """Decodes a token to its letter."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def record(sample: int, prompt: str = "p", **more: Any) -> TokenRecord:
    given: dict[str, Any] = {"trainer_logprobs": (-0.75, -0.5), "advantages": (1.0, -1.0), **more}
    return TokenRecord(
        prompt_id=prompt,
        sample=sample,
        prompt_ids=(0,),
        token_ids=(sample, 2),
        mask=(True, True),
        versions=(0, 0),
        engine_logprobs=(-1.0, -0.5),
        entropies=(0.5, 0.25),
        reference_logprobs=None,
        reward=1.0,
        status="ok",
        finish_reason="stop",
        **given,
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(Run, "tokenizer", lambda self: Tokenizer())
    records = [record(0), record(1, advantages=None), record(2, "other")]
    write_token_records(token_file(tmp_path / "rollouts", 1), records)
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("quantity", "numbers"),
    [("advantage", [1.0, -1.0]), ("entropy", [0.5, 0.25]), ("gap", [0.25, 0.0]), ("surprise", [1.0, 0.5])],
)
def test_each_token_has_its_text_and_number(quantity: str, numbers: list[float], run: Run) -> None:
    tokens = group_tokens(run, 1, "p", quantity)
    assert list(tokens.answers[0].pieces) == ["a", "c"]
    assert list(tokens.answers[0].numbers) == numbers
    assert set(tokens.answers) == ({0} if quantity == "advantage" else {0, 1})
    assert not tokens.why_none


def test_a_step_that_was_not_recorded_says_so(run: Run) -> None:
    assert "no record of the tokens of step 2" in group_tokens(run, 2, "p", "advantage").why_none


def test_answers_that_were_left_out_have_no_advantage(run: Run) -> None:
    write_token_records(token_file(run.path / "rollouts", 1), [record(0, advantages=None, trainer_logprobs=None)])
    assert "have no advantage" in group_tokens(run, 1, "p", "advantage").why_none
    assert "have no gap" in group_tokens(run, 1, "p", "gap").why_none
