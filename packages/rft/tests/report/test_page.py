"""The whole page of a report."""

import json
import re
import socket
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rft.report.page import report
from rft.report.written import lines
from rft.resolved import Resolved
from rft.settings import ReportFileSettings, ReportSettings
from rft_core.errors import CheckpointError
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, write_token_records

HOSTILE = "</script><script>alert(1)</script>\x1b[31m"
TOKENS: dict[str, Any] = {
    "prompt_ids": (1,),
    "mask": (True, True),
    "versions": (0, 0),
    "engine_logprobs": (0.0, 0.0),
    "trainer_logprobs": None,
    "entropies": None,
    "reference_logprobs": None,
    "status": "ok",
    "finish_reason": "stop",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps whose texts are hostile."""
    path = tmp_path / "mine"
    (path / "rollouts").mkdir(parents=True)
    rows = [{"step": step, "reward/mean": step / 4, "time/train": 1.0, HOSTILE: 1} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"outcome": "finished", "steps": 3, "seconds": 3.0}))
    (path / "config.yaml").write_text(f"recipe:\n  command: rl\nprompt_data: {HOSTILE[:20]} # command line\n")
    (path / "command.txt").write_text("rft-train rl --use_wandb x --key hf_" + "a" * 34)
    for step in (1, 3):
        answer = {"prompt": HOSTILE, "prompt_id": "p", "sample": 0, "response": HOSTILE, "reward": 1.0, "label": "7"}
        (path / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(answer) + "\n")
    return path


def test_a_page_needs_no_network_and_runs_nothing_of_a_sample(run: Path) -> None:
    page = report(run)
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert page.count("</script>") == 3
    assert not re.search(r"(src|href)=", page)
    assert "default-src 'none'" in page
    assert "hf_aaaa" not in page
    assert len(page) < 3 << 20


def test_the_data_of_the_curves_are_those_of_the_run(run: Path) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report(run))
    assert found is not None
    data = json.loads(found[1])
    assert data["training"]["steps"] == [1, 2, 3]
    assert data["training"]["series"]["reward/mean"] == [0.25, 0.5, 0.75]


def test_samples_of_the_start_and_of_the_end_are_there(run: Path) -> None:
    page = report(run)
    assert "step 1, the start" in page
    assert "step 3, the end" in page
    assert "<dd>7" in page


def test_a_run_of_which_nothing_is_left_but_rows_is_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "x"')
    (tmp_path / "env.json").write_text(json.dumps({"host": socket.gethostname()}))
    assert "stopped without an end after 1 step." in report(tmp_path)


def test_the_report_is_written_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    def written(**chosen: str) -> str:
        settings = ReportSettings(report=ReportFileSettings(**chosen))
        return next(lines(Resolved("report", settings, {}, {}, "", (), (), "")))

    assert written(run=str(run)).startswith(f"{run / 'report.html'}: ")
    assert written(run=str(run), output=str(tmp_path / "x.html")).startswith(f"{tmp_path / 'x.html'}: ")
    assert (tmp_path / "x.html").read_text() == (run / "report.html").read_text()
    with pytest.raises(CheckpointError, match="no run at"):
        written(run=str(tmp_path / "nowhere"))


def test_the_charting_library_is_the_one_that_is_recorded() -> None:
    folder = files("rft.report").joinpath("assets")
    record = json.loads(folder.joinpath("uPlot.json").read_text())
    assert (record["licence"], record["version"]) == ("MIT", "1.6.32")
    for name, digest in record["sha256"].items():
        assert sha256(folder.joinpath(name).read_bytes()).hexdigest() == digest
    assert "Leon Sorokin" in folder.joinpath("uPlot.LICENSE").read_text()


def test_tokens_of_an_answer_have_the_colour_of_their_advantage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        def decode(self, ids: list[int], **options: object) -> str:
            return "".join({4: "good", 5: "<bad>"}[token] for token in ids)

    monkeypatch.setattr("rft.library.run.Run.tokenizer", lambda self: Words())
    record = TokenRecord(prompt_id="p", sample=0, token_ids=(4, 5), advantages=(1.0, -0.5), reward=1.0, **TOKENS)
    write_token_records(token_file(run / "rollouts", 3), [record])
    page = report(run)
    assert 'title="+1" style="background:color-mix(in srgb, var(--better) 100%, transparent)">good</span>' in page
    assert (
        'title="-0.5" style="background:color-mix(in srgb, var(--worse) 50%, transparent)">&lt;bad&gt;</span>' in page
    )
