"""Sampled answers beside their images: a page that needs no other file, and whose texts are texts."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main
from rft_cli.pages import run_summary, samples_html
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.tasks.drawn_images import drawings

(DRAWING,) = drawings(0, "test", 1)
PNG = DRAWING.png


def row(**entry: Any) -> dict[str, Any]:
    told = {"path": None, "where": "rows.jsonl:3:image", "digest": "d", "width": 48, "height": 48, "tokens": 9}
    return {
        "prompt": "<image>how <b>many</b>?",
        "response": "4 [bold]",
        "label": "4",
        "reward": 1.0,
        "status": "ok",
        "images": [told | entry],
        "image_tokens": 9,
    }


def other(values: dict[str, Any], number: int) -> dict[str, Any]:
    """A row of another prompt."""
    return values | {"prompt_id": f"p:{number}"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config_text="a: 1\n", command=["x"], environment={})


def test_the_page_holds_the_images_and_escapes_the_texts(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (run.rollouts_directory / "images").mkdir()
    (run.rollouts_directory / "images" / "b.png").write_bytes(PNG + b"\0")
    run.write_rollouts(
        10, [row(path=str(tmp_path / "a.png")), other(row(file="images/b.png"), 2), other(row(file=None), 3)]
    )
    file = samples_html.write(run.path)
    assert file == run.path / "samples.html"
    page = (run.path / "samples.html").read_text()
    for data in (PNG, PNG + b"\0"):
        assert f"data:image/png;base64,{base64.b64encode(data).decode()}" in page
    assert "&lt;image&gt;how &lt;b&gt;many&lt;/b&gt;?" in page
    assert "<b>" not in page
    assert "rows.jsonl:3:image (48 x 48, 9 tokens), not kept" in page
    assert "<script" not in page


def test_a_large_image_is_a_link_and_one_that_has_gone_is_said(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(PNG + bytes(1 << 20))
    run.write_rollouts(10, [row(path=str(tmp_path / "large.png")), other(row(path=str(tmp_path / "gone.png")), 2)])
    file = samples_html.write(run.path)
    assert file is not None
    page = file.read_text()
    assert f'<a href="file://{tmp_path}/large.png">large.png</a>' in page
    assert "not kept" in page


def test_a_prompt_of_a_run_of_text_is_there_once_with_all_its_answers_and_their_rewards(run: RunDirectory) -> None:
    assert samples_html.write(run.path) is None
    one = {"prompt_id": "p:1", "prompt": "1+1=", "label": "2"}
    answers = [
        one | {"response": "2", "reward": 0.5, "breakdown": {"correctness": 1.0, "format": 0.0}},
        one | {"response": "3", "reward": None, "status": "failed", "failure": "timeout"},
    ]
    run.write_rollouts(10, [*answers, {"prompt_id": "p:2", "prompt": "2+2=", "response": "4", "reward": 1.0}])
    file = samples_html.write(run.path)
    assert file is not None
    page = file.read_text()
    assert page.count("1+1=") == 1
    assert "<td class=text rowspan=2>1+1=<td class=text rowspan=2>2<td class=text>2<td>0.5<br>" in page
    assert "correctness 1, format 0" in page
    assert "<td class=text>3<td>timeout" in page
    assert "3 sampled answers to 2 prompts;" in page
    assert "<th>images" not in page


def test_an_answer_has_its_advantage_where_the_rows_hold_it(run: RunDirectory) -> None:
    one = {"prompt_id": "p:1", "prompt": "1+1=", "reward": 1.0}
    answers = [one | {"advantage": 0.8164}, one | {"advantage": -1}, one | {"advantage": None}]
    run.write_rollouts(10, [{**answer, "response": str(index)} for index, answer in enumerate(answers)])
    run.write_rollouts(9, [{"prompt": "2+2=", "response": "4", "reward": 1.0}])
    file = samples_html.write(run.path)
    assert file is not None
    newer, older = file.read_text().split("<h2>step 9")
    assert "<th>reward<th>advantage" in newer
    assert "<td class=text>0<td>1<td>+0.816" in newer
    assert "<td class=text>1<td>1<td>-1" in newer
    assert "<td class=text>2<td>1<td class=dim>not trained on" in newer
    assert "advantage" not in older


def test_steps_are_spread_over_the_run_with_the_last_on_top(run: RunDirectory) -> None:
    for step in range(1, 11):
        run.write_rollouts(step, [{"prompt": "1+1=", "response": "2", "reward": 1.0}] * 40)
    file = samples_html.write(run.path)
    assert file is not None
    page = file.read_text()
    assert re.findall(r"<h2>step (\d+)", page) == ["10", "7", "4", "1"]
    assert page.count("16 sampled answers to 1 prompt;") == 4


def test_an_image_is_on_the_page_once(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    answers = [row(path=str(tmp_path / "a.png")) | {"prompt_id": "p:1"}] * 3
    run.write_rollouts(10, answers)
    run.write_rollouts(20, answers)
    file = samples_html.write(run.path)
    assert file is not None
    page = file.read_text()
    assert page.count("data:image/png") == 1
    assert page.count("<figure id=image-1>") == page.count('<a href="#image-1">shown above</a>') == 1


def test_the_end_of_a_run_shows_where_the_images_are(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "a.png").write_bytes(PNG)
    run.write_rollouts(10, [row(path=str(tmp_path / "shapes" / "a.png"))])
    run_summary.show(run.path, {"outcome": "finished", "steps": 10, "seconds": 3.0}, [])
    printed = capsys.readouterr().out
    assert "shapes/a.png (48 x 48, 9 tokens)" in printed
    assert "4 [bold]" in printed
    assert f"sampled answers, for a browser: {run.path / 'samples.html'}" in printed
    assert main(["runs", "show", str(run.path)]) == 0
    assert "samples.html: sampled answers, for a browser" in capsys.readouterr().out
