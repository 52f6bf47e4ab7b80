"""Tokens of the answers of a group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft.dashboard.token_pages import TokenPages
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, write_token_records

Make = Callable[..., Path]


class Words:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(chr(97 + token) for token in ids)


def record(sample: int, advantages: tuple[float, ...] | None) -> TokenRecord:
    numbers: dict[str, Any] = {"trainer_logprobs": None, "entropies": None, "reference_logprobs": None}
    return TokenRecord(
        prompt_id="p",
        sample=sample,
        prompt_ids=(1,),
        token_ids=(0, 1),
        mask=(True, True),
        versions=(0, 0),
        engine_logprobs=(-1.0, -2.0),
        advantages=advantages,
        reward=1.0,
        status="ok",
        finish_reason="stop",
        **numbers,
    )


def test_tokens_have_the_numbers_of_their_record(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    read: list[str] = []
    monkeypatch.setattr("rft.library.run.Run.tokenizer", lambda self: read.append("tokenizer") or Words())
    write_token_records(token_file(run / "rollouts", 3), [record(0, (1.0, -0.5)), record(1, None)])
    pages = TokenPages(RunFolders([run.parent]))
    assert pages.tokens(run, 3, "p", "advantage") == {
        "answers": {"0": {"pieces": ["a", "b"], "numbers": [1.0, -0.5]}},
        "why_none": "",
    }
    assert set(pages.tokens(run, 3, "p", "surprise")["answers"]) == {"0", "1"}
    assert read == ["tokenizer"]
    # the step was made again
    write_token_records(token_file(run / "rollouts", 3), [record(0, (2.0, 2.0)), record(1, None)])
    assert pages.tokens(run, 3, "p", "advantage")["answers"]["0"]["numbers"] == [2.0, 2.0]


def test_a_run_without_records_says_so(make_run: Make) -> None:
    run = make_run()
    found = TokenPages(RunFolders([run.parent])).tokens(run, 3, "p", "advantage")
    assert found["answers"] == {}
    assert "no record of the tokens" in found["why_none"]


def test_what_is_no_quantity_and_what_leads_elsewhere_is_refused(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    pages = TokenPages(RunFolders([run.parent]))
    with pytest.raises(RequestRefused, match="quantity is one of"):
        pages.tokens(run, 3, "p", "__class__")
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    (run / "checkpoints" / "step_000001" / "model").symlink_to(tmp_path.parent)
    with pytest.raises(RequestRefused, match="leads out"):
        pages.tokens(run, 3, "p", "advantage")
    (run / "checkpoints" / "step_000001" / "model").unlink()
    (run / "checkpoints" / "other_places.txt").write_text(f"{tmp_path.parent}\n")
    with pytest.raises(RequestRefused, match="leads out"):
        pages.tokens(run, 3, "p", "advantage")
