"""Stages are run where their options or inputs have changed, and an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.pipeline.run import run_stages
from rft_genrec.settings.run import GenrecRunSettings, PipelineSettings, StageOptionSettings


@dataclass
class Commands:
    """Stages that write what their options say; `fails` ends in the middle."""

    fails: str = ""
    ran: list[str] = field(default_factory=list)

    def __call__(self, words: Sequence[str]) -> Generator[str, None, int]:
        yield f"does {words[1]}"
        self.ran.append(" ".join(words[:1] if words[0] == "resume" else words[1:2]))
        place = Path(words[-1] if words[0] == "resume" else words[words.index("--save_path") + 1])
        if words[0] == "resume" or words[1] == "sft":
            self._train(place, done=self.fails != "sft")
        else:
            place.mkdir()
            (place / "tools.item.json").write_text(words[-1])
            (place / "train.csv").write_text("always the same")
        return 3 if self.fails == words[1] else 0

    def _train(self, place: Path, *, done: bool) -> None:
        model = place / "checkpoints" / "step_000001" / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}")
        (model.parent / "manifest.json").write_text("{}")
        if done:
            (place / "summary.json").write_text(json.dumps({"outcome": "finished"}))


def settings(folder: Path, data: str = "a", sft: str = "") -> GenrecRunSettings:
    options = StageOptionSettings(data_options=f"--input {data}", sft_options=sft)
    return GenrecRunSettings(pipeline=PipelineSettings(stages="data,sft", save_path=str(folder)), options=options)


def test_only_what_has_changed_is_run_again(tmp_path: Path) -> None:
    commands = Commands()
    lines = list(run_stages(settings(tmp_path), commands))
    assert "does data" in lines
    assert lines[-1].startswith("all 2 stages are finished")
    again = list(run_stages(settings(tmp_path), commands))
    assert commands.ran == ["data", "sft"]
    assert again[0] == "stage 1 of 2, data: options and inputs are unchanged, passed over"
    other = list(run_stages(settings(tmp_path, sft="--max_steps 3"), commands))
    assert commands.ran == ["data", "sft", "sft"]
    assert "stage 2 of 2, sft: begins again, since its options have changed" in other
    assert (tmp_path / "sft-1").is_dir()
    # the items are others then, and what reads them is made anew
    list(run_stages(settings(tmp_path, data="b", sft="--max_steps 3"), commands))
    assert commands.ran == ["data", "sft", "sft", "data", "sft"]
    (tmp_path / "catalogue" / "train.csv").unlink()
    gone = list(run_stages(settings(tmp_path, data="b", sft="--max_steps 3"), commands))
    assert "stage 1 of 2, data: begins again, since what it had written is gone or changed" in gone
    assert commands.ran[5:] == ["data"]  # which wrote the same bytes, so that the model is that of these files


def test_an_interrupted_run_is_continued_and_a_failure_is_told(tmp_path: Path) -> None:
    commands = Commands(fails="sft")
    with pytest.raises(DataError, match="the stage sft has ended with exit code 3"):
        list(run_stages(settings(tmp_path), commands))
    commands.fails = ""
    lines = list(run_stages(settings(tmp_path), commands))
    assert commands.ran == ["data", "sft", "resume"]
    assert "stage 2 of 2, sft: had not ended" in lines


def test_a_stage_that_writes_elsewhere_is_refused(tmp_path: Path) -> None:
    def nothing(words: Sequence[str]) -> Generator[str, None, int]:
        yield "does nothing"
        return 0

    with pytest.raises(DataError) as refused:
        list(run_stages(settings(tmp_path), nothing))
    assert refused.value.problem.code == "genrec.stage_wrote_nothing"
    assert refused.value.problem.state == "finished stages are kept; the next call goes on with this one"
