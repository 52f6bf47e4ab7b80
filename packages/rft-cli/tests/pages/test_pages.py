"""What people look at: the panel, its plain lines, the pages of runs and recipes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rft_cli.main import main
from rft_cli.pages.charts import amount, duration, shares, sparkline
from rft_cli.pages.live_panel import LivePanel, outcome_line, plain_line
from rft_cli.records.discovery import training_of
from rft_trainer.runs.reader import read_run

RECORD: dict[str, object] = {
    "step": 3,
    "num_steps": 40,
    "reward/mean": 0.5,
    "policy/kl": 0.00012,
    "policy/clip_fraction": 0.02,
    "policy/entropy": 1.5,
    "policy/gradient_norm": 0.7,
    "completion/length_mean": 12.4,
    "completion/truncated_share": 0.03,
    "time/tokens_per_second": 5321.4,
    "time/samples_per_minute": 812.0,
    "time/rollout": 1.0,
    "time/train": 3.0,
    "time/step": 4.0,
    "time/left": 148.0,
}
SUMMARY = {
    "outcome": "finished",
    "steps": 40,
    "seconds": 112.0,
    "eval": {"before": {"accuracy": 0.08, "n": 200}, "after": {"accuracy": 0.81, "n": 200}},
}


RL, SFT = training_of("rl"), training_of("sft")


def shown(panel: LivePanel, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(panel.render())
    return console.export_text()


def plain(log_interval: int = 1) -> tuple[LivePanel, io.StringIO]:
    stream = io.StringIO()
    return LivePanel(RL, stream=stream, log_interval=log_interval), stream


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    panel, stream = plain()
    panel.start({"run_name": "sums", "num_steps": 40})
    for step in (1, 2, 3):
        panel.step({**RECORD, "step": step})
    panel.evaluation({"step": 3, "name": "step 3", "eval/accuracy": 0.25, "eval/n": 200})
    panel.evaluation({"step": 3, "name": "after", "eval/accuracy": 0.5})
    panel.finish(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["start", "step", "step", "step", "eval", "eval", "done"]
    assert "\x1b" not in stream.getvalue()
    assert lines[4] == "eval   step 3 accuracy=0.250 n=200"
    assert lines[5] == "eval   step 3 after accuracy=0.500"
    assert "8.0% (n=200) -> 81.0% (n=200)" in lines[6]


def test_a_plain_line_tells_how_much_of_the_device_is_used() -> None:
    record = {**RECORD, "time/model_tflops": 123.456, "time/share_data": 0.25}
    assert " TFLOP/s=123 wait=25% " in " ".join(plain_line(record, SFT).split())
    assert " MFU=41.3% wait=25% " in " ".join(plain_line({**record, "time/mfu": 0.4134}, SFT).split())
    assert "TFLOP/s" not in plain_line(RECORD, SFT)


def test_a_plain_line_holds_the_numbers_of_its_step() -> None:
    line = plain_line(RECORD, RL)
    for part in (
        "step  3/40",
        "reward=0.500",
        "kl=0.0001",
        "clip=0.020",
        "tok/s=5321",
        "samples/min=812",
        "left=2 min 28 s",
    ):
        assert part in line


def test_lines_come_every_log_interval_and_at_the_end() -> None:
    panel, stream = plain(log_interval=10)
    for step in range(1, 26):
        panel.step({**RECORD, "step": step, "num_steps": 25})
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["10/25", "20/25", "25/25"]


def test_the_number_of_steps_may_come_from_the_start_alone() -> None:
    panel, stream = plain()
    panel.start({"num_steps": 40})
    panel.step({"step": 3})
    assert stream.getvalue().splitlines()[1].split() == ["step", "3/40"]


def test_a_long_line_is_not_broken() -> None:
    panel, stream = plain()
    panel.start({"run_directory": "x" * 300})
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", True])
def test_what_is_no_number_is_left_out_and_breaks_nothing(value: object) -> None:
    assert "reward" not in plain_line({**RECORD, "reward/mean": value}, RL)
    panel, _ = plain()
    panel.step({**RECORD, "reward/mean": value, "time/left": value})
    assert "step 3 / 40" in shown(panel)


def test_an_empty_record_breaks_nothing() -> None:
    panel, stream = plain()
    panel.start({})
    panel.step({})
    panel.evaluation({})
    panel.finish({})
    assert "not scored yet" in shown(panel)
    assert stream.getvalue()


def test_the_panel_shows_progress_curve_score_speed_and_shares() -> None:
    panel, _ = plain()
    panel.start({"run_name": "sums [1]", "run_directory": "runs/sums", "num_steps": 40})
    panel.evaluation({"step": 0, "eval/accuracy": 0.1})
    for step in range(1, 9):
        panel.step({**RECORD, "step": step, "reward/mean": step / 10})
    panel.evaluation({"step": 8, "eval/accuracy": 0.35})
    text = shown(panel)
    for part in ("sums [1]", "runs/sums", "step 8 / 40", "2 min 28 s left", "35.0%", "+25.0 points since step 0"):
        assert part in text
    for part in ("5,321 tok/s", "812 samples/min", "rollout 25%", "train 75%", "3% cut off", "entropy 1.500"):
        assert part in text
    assert "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588" in text
    widths = {len(line) for line in text.splitlines()}
    assert widths == {100}


@pytest.mark.parametrize("width", [48, 60, 80])
def test_a_narrow_panel_cuts_no_name_and_no_number(width: int) -> None:
    panel = LivePanel(RL, console=Console(file=io.StringIO(), width=width))
    panel.start({"run_name": "sums", "run_directory": "/data/somebody/runs/and/more/folders/sums", "num_steps": 40})
    panel.evaluation({"step": 0, "eval/accuracy": 0.1})
    panel.evaluation({"step": 8, "eval/accuracy": 0.35})
    phases = dict.fromkeys(("time/rollout", "time/reward", "time/logprob", "time/train", "time/sync"), 1.0)
    critic = {"critic/loss": 0.25, "critic/explained_variance": 0.75}
    for step in range(1, 100):
        panel.step({**RECORD, **phases, **critic, "step": step, "time/tokens_per_second": 12345.0})
    text = shown(panel, width)
    assert {len(line) for line in text.splitlines()} == {width}
    for name in ("reward", "held-out", "speed", "response", "policy", "critic"):
        assert f"\u2502 {name} " in text
    for part in ("12,345 tok/s", "entropy 1.500", "norm 0.700", "v_loss 0.250", "v_explained 0.750", "\u25a0 sync 20%"):
        assert part in text
    assert "folders/sums" in text
    words = " ".join(text.replace("\u2502", " ").split())
    assert "+25.0 points since step 0" in words


def test_the_line_of_a_step_has_the_numbers_of_a_critic_where_one_is_trained() -> None:
    line = plain_line({**RECORD, "critic/loss": 0.25, "critic/explained_variance": 0.75}, RL)
    assert "  v_loss=0.2500  v_explained=0.75  " in line
    assert "v_loss" not in plain_line(RECORD, RL)


def test_supervised_training_shows_its_loss_and_that_of_the_held_out_rows() -> None:
    stream = io.StringIO()
    panel = LivePanel(SFT, stream=stream)
    panel.evaluation({"step": 0, "eval/loss": 2.75})
    panel.step({"step": 1, "num_steps": 2, "sft/loss": 2.5, "policy/gradient_norm": 0.75, "policy/kl": 9.0})
    panel.evaluation({"step": 1, "eval/loss": 2.25})
    for part in ("loss", "2.500", "2.2500", "-0.5000 since step 0", "norm 0.750"):
        assert part in shown(panel)
    assert "kl" not in shown(panel), "no number of its command"
    panel.finish({"outcome": "finished", "eval": {"before": {"loss": 2.75}, "after": {"loss": 2.25}}})
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 1/2  loss=2.5000  norm=0.750"
    assert "held-out loss 2.7500 -> 2.2500" in lines[-1]


def test_a_terminal_gets_one_live_panel_and_it_is_given_back() -> None:
    stream = io.StringIO()
    panel = LivePanel(RL, console=Console(file=stream, force_terminal=True, width=100))
    panel.start({"run_name": "sums"})
    panel.step(RECORD)
    panel.close()
    panel.close()
    assert "sums" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_the_outcome_is_one_line_and_needs_nothing() -> None:
    assert outcome_line({}, RL.held_out) == "done   finished"
    assert outcome_line({"outcome": "stopped", "eval": {"before": None}}, RL.held_out) == "done   stopped"


# --- charts


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, "01234567") == "01234567"
    assert sparkline([5, 5], 8, "01234567") == "44"
    assert sparkline([], 8) == ""
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([0, float("nan"), 1], 8, "ab") == "ab"


def test_shares_fill_the_bar_exactly() -> None:
    assert shares({"a": 1.0, "b": 1.0, "c": 1.0}, 10) == {"a": 4, "b": 3, "c": 3}
    assert sum(shares({"a": 0.001, "b": 7.0, "c": 2.5}, 77).values()) == 77
    assert shares({"a": 0.0}, 10) == {"a": 0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (None, ""), (-1, "")],
)
def test_durations_read_naturally(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (0.125, "0.125"), (1e-6, "1.0e-06"), (0, "0.000"), (None, "")]
)
def test_amounts_keep_small_numbers_visible(value: float | None, text: str) -> None:
    assert amount(value) == text


# --- runs


def write_run(name: str, *, finished: bool = True) -> Path:
    path = Path("runs") / name
    (path / "checkpoints" / "step_000040").mkdir(parents=True)
    (path / "checkpoints" / "step_000040" / "manifest.json").write_text("{}")
    (path / "checkpoints" / "step_000050").mkdir()
    (path / "config.yaml").write_text("seed: 1      # command line\ntop_p: 1.0      # default\n")
    (path / "command.txt").write_text("rft-train rl --seed 1\n")
    rows = [json.dumps({"step": i, "reward/mean": i / 40, "time/step": 2.0}) for i in range(1, 41)]
    (path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 41, "rew')
    (path / "evals.jsonl").write_text('{"step": 0, "name": "before", "eval/accuracy": 0.08, "eval/n": 200}\n')
    if finished:
        (path / "summary.json").write_text(json.dumps(SUMMARY))
    return path


def test_the_table_lists_every_run_with_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("sums-1")
    write_run("sums-2", finished=False)
    (Path("runs") / "not-a-run").mkdir()
    assert main(["runs"]) == 0
    text = capsys.readouterr().out
    first, second = (next(line for line in text.splitlines() if name in line) for name in ("sums-1", "sums-2"))
    assert all(part in first for part in ("finished", "40", "1.000", "8.0% -> 81.0%", "1 min 52 s"))
    assert all(part in second for part in ("running", "40", "8.0%", "1 min 20 s"))
    assert "not-a-run" not in text


def test_each_run_is_shown_with_the_numbers_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("sums-1")
    path = write_run("words-1", finished=False)
    (path / "config.yaml").write_text("recipe:\n  command: sft\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.5, "reward/mean": 9}\n{"step": null}\n')
    (path / "evals.jsonl").write_text('{"step": 0, "name": "before", "eval/loss": 2.25, "eval/accuracy": 1}\n')
    assert main(["runs"]) == 0
    table = capsys.readouterr().out.splitlines()
    head, words, sums = (
        next(line for line in table if line.startswith(name)) for name in ("run ", "words-1", "sums-1")
    )
    columns = {name: head.index(name) + len(name) for name in ("loss", "reward", "held-out")}
    cells = {name: words[:end].split()[-1] for name, end in columns.items()}
    assert cells["loss"] == "2.500"
    assert words[: columns["held-out"]].endswith("loss 2.2500")
    assert "9.000" not in words
    assert sums[: columns["reward"]].endswith("1.000")
    assert sums[: columns["held-out"]].endswith("8.0% -> 81.0%")
    assert "words-1: metrics.jsonl: 1 of 2 lines are no records of a step, the first is line 2" in table
    assert main(["runs", "show", "words-1"]) == 0
    page = capsys.readouterr().out
    assert "sft/loss" in page
    assert "loss 2.2500" in page
    assert "reward/mean" not in page
    assert "accuracy" not in page


def test_one_run_is_shown_in_detail_by_name_or_path(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("sums-1")
    for reference in ("sums-1", "runs/sums-1"):
        assert main(["runs", "show", reference]) == 0
        text = capsys.readouterr().out
        for part in (
            "finished",
            "rft-train rl --seed 1",
            "seed",
            "command line",
            "reward/mean",
            "0.025 -> 1.000",
            "step_000040",
        ):
            assert part in text
        assert "top_p" not in text
        assert "step_000050" not in text


def test_the_health_of_a_run_is_shown_from_its_summary_or_else_from_its_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run("sums-1")
    rows = [json.dumps({"step": step, "completion/truncated_share": 1.0}) for step in range(1, 7)]
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert main(["runs", "show", "sums-1"]) == 0  # its summary is older than detectors
    assert "step 5, never_ends: 100% of the responses" in " ".join(capsys.readouterr().out.split())
    found = {"name": "clipping", "level": "warning", "step": 3, "what": "the clip took much", "do": "less"}
    (path / "summary.json").write_text(json.dumps(SUMMARY | {"health": [found]}))
    assert main(["runs", "show", "sums-1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "warning step 3, clipping: the clip took much do less" in text
    assert "never_ends" not in text


def test_an_unknown_run_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("sums-1")
    assert main(["runs", "show", "sums"]) == 4
    assert "rft-train runs show sums-1" in capsys.readouterr().err
    assert main(["runs", "show"]) == 4
    assert main(["runs", "nowhere"]) == 4


def test_no_runs_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "quickstart" in capsys.readouterr().out


def test_damaged_files_are_read_as_far_as_they_go() -> None:
    path = write_run("sums-1")
    (path / "summary.json").write_text("{")
    (path / "evals.jsonl").write_bytes(b"\xff\xfe\n[1]\n")
    run = read_run(path)
    assert (run.step, len(run.metrics), run.summary, run.evaluations) == (40, 40, {}, [])


def test_a_run_that_stopped_writing_is_not_called_running(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run("sums-1", finished=False)
    assert read_run(path).outcome == "running"
    monkeypatch.setattr("rft_trainer.runs.reader.time.time", lambda: read_run(path).touched + 3600)
    assert read_run(path).outcome == "stopped"


@pytest.mark.parametrize(
    "argv", [["runs", "--foo"], ["runs", "a", "b"], ["runs", "show", "a", "b"], ["recipes", "list", "x"]]
)
def test_pages_refuse_what_they_do_not_know(argv: list[str]) -> None:
    assert main(argv) == 2


# --- recipes


def test_recipes_are_listed_with_what_they_say_of_themselves(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "addition" in line)
    assert all(part in line for part in ("rl", "add numbers", "2 CPU cores", "accuracy 0.1 -> 0.9 (2026-11-20)"))
    assert "spelling" in text


def test_a_recipe_is_shown_as_it_is_and_resolved(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "addition"]) == 0
    assert capsys.readouterr().out == (recipes / "addition.yaml").read_text()
    assert main(["recipes", "show", "addition", "--resolved", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    rows = {line.split(":")[0]: line for line in text.splitlines()}
    assert rows["seed"].endswith("# command line")
    assert "addition.yaml:8" in rows["n_samples_per_prompt"]
    assert rows["top_k"].endswith("# default")
    assert "# pretrain: required, not given" in text


def test_a_flag_that_would_change_nothing_is_refused(recipes: Path) -> None:
    assert main(["recipes", "show", "addition", "--seed", "7"]) == 2
    assert main(["recipes", "show", "addition", "--resolved", "--sede", "7"]) == 2


def test_a_recipe_is_copied_once_and_then_runs_by_its_file(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "addition"]) == 0
    assert "--config addition.yaml" in capsys.readouterr().out
    assert main(["recipes", "copy", "addition"]) == 4
    assert "my-addition.yaml" in capsys.readouterr().err
    assert main(["recipes", "copy", "addition", "other.yaml"]) == 0
    assert Path("other.yaml").read_text() == (recipes / "addition.yaml").read_text()


def test_an_unknown_recipe_names_the_nearest(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "adition"]) == 4
    assert "rft-train recipes show addition" in capsys.readouterr().err
    assert main(["recipes", "shwo"]) == 2
    assert "rft-train recipes show" in capsys.readouterr().err


def test_a_rounding_error_is_shown_as_0_and_what_matters_beside_it() -> None:
    record = {"step": 3, "num_steps": 9, "policy/kl": 1.4e-14, "reward/groups_with_signal": 0.25, "kl/reference": 2e-6}
    line = plain_line(record, RL)
    assert "kl=0.0000" in line
    assert "signal=0.25" in line
    assert "ref_kl=2.0e-06" in line


def test_responses_without_a_reward_are_on_the_line_of_their_step_alone() -> None:
    failed = {**RECORD, "reward/unscored": 0.25, "reward/unscored_exception": 3, "reward/unscored_none": 1}
    assert "  unscored=0.250 (exception 3, none 1)  " in plain_line(failed, RL)
    assert "unscored" not in plain_line(RECORD, RL)
    panel = LivePanel(RL, console=Console(file=io.StringIO(), force_terminal=True, width=100))
    panel.step(failed)
    assert "exception 3, none 1" in shown(panel)
    panel.step(RECORD)
    assert "unscored" not in shown(panel), "of an earlier step"


def test_a_reward_models_run_shows_its_interval_and_its_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs" / "scores"
    path.mkdir(parents=True)
    (path / "command.txt").write_text("rft-train rm\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "rm/accuracy": 0.5, "rm/loss": 0.7}\n')
    row: dict[str, object] = {"step": 1, "name": "after", "eval/accuracy": 0.75, "eval/n": 4}
    row |= {"eval/accuracy_low": 0.3, "eval/accuracy_high": 0.95, "eval/calibration_error": 0.125}
    row["calibration"] = [{"low": 0.5, "high": 0.55, "num": 4, "predicted": 0.52, "observed": 0.75}]
    (path / "evals.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["runs", "show", str(path)]) == 0
    page = capsys.readouterr().out
    assert "accuracy 75.0% (30.0% to 95.0%)" in page
    assert "sure 50% to 55%  predicted 52.0%  right 75.0%  n=4" in page
    assert "expected calibration error 0.1250" in page
