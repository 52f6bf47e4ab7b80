"""A run as an object: what it reads, what it draws, which checkpoint it loads, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.checkpoints import export as export_module
from rft.library import run as library
from rft_core.errors import DataError, OptionsError, PreflightError
from rft_models.loading import transformers_loading
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, write_token_records

METRICS = [{"step": 1, "reward/mean": 0.25, "policy/kl": None}, {"step": 2, "reward/mean": 0.5, "policy/kl": 0.125}]
EVALUATIONS = [{"step": 0, "name": "before", "eval/accuracy": 0.0}, {"step": 2, "name": "after", "eval/accuracy": 0.75}]
SAMPLES = [{"prompt": "ab>", "response": "ba", "reward": 1.0}, {"prompt": "cd>", "response": "cd", "reward": 0.0}]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two steps, with two checkpoints and the rollouts of the second step."""
    path = tmp_path / "reversal"
    write(path / "metrics.jsonl", METRICS)
    write(path / "evals.jsonl", EVALUATIONS)
    write(path / "rollouts" / "step_000002.jsonl", SAMPLES)
    (path / "summary.json").write_text('{"outcome": "finished"}')
    (path / "command.txt").write_text("rft-train rl --pretrain m\n")
    (path / "config.yaml").write_text("pretrain: m   # command line\nseed: 42   # default\n")
    for step in (0, 2):
        write(path / "checkpoints" / f"step_{step:06}" / "manifest.json", [])
    return path


def test_a_run_is_what_its_directory_holds(folder: Path) -> None:
    run = rft.Run(folder)
    assert (run.name, run.outcome, run.step, run.command) == ("reversal", "finished", 2, "rft-train rl --pretrain m")
    assert run.settings == {"pretrain": "m"}
    assert run.metrics["reward/mean"] == [0.25, 0.5]
    assert run.metrics["policy/kl"] == [None, 0.125]
    assert run.evaluations.pairs("name", "eval/accuracy") == [("before", 0.0), ("after", 0.75)]
    assert run.samples == [{"step": 2, **row} for row in SAMPLES]
    assert run.checkpoints == [0, 2]
    assert repr(run) == f"Run('{folder}'): finished at step 2"


def test_tokens_are_those_of_a_step_that_was_recorded(folder: Path) -> None:
    run = rft.Run(folder)
    with pytest.raises(OptionsError, match="no record of the tokens of any step") as caught:
        run.tokens()
    assert caught.value.problem.do == "rft.rl(..., token_records='shown')"
    for step in (1, 2):
        record = TokenRecord(
            prompt_id="p",
            sample=step,
            prompt_ids=(),
            token_ids=(7,),
            mask=(True,),
            versions=(0,),
            engine_logprobs=(-0.5,),
            trainer_logprobs=None,
            entropies=None,
            reference_logprobs=None,
            advantages=None,
            reward=1.0,
            status="ok",
            finish_reason="stop",
        )
        write_token_records(token_file(folder / "rollouts", step), [record])
    assert [one.sample for one in run.tokens()] == [2]
    assert [one.sample for one in run.tokens(1)] == [1]
    with pytest.raises(OptionsError, match="of step 4") as caught:
        run.tokens(4)
    assert caught.value.problem.do == "run.tokens(2)"


def test_a_run_that_goes_on_shows_its_last_step(folder: Path) -> None:
    run = rft.Run(str(folder))
    write(folder / "metrics.jsonl", [*METRICS, {"step": 3, "reward/mean": 0.75}])
    assert (run.step, run.metrics["reward/mean"]) == (3, [0.25, 0.5, 0.75])


def test_tables_are_frames(folder: Path) -> None:
    run = rft.Run(folder)
    assert run.frame()["reward/mean"].tolist() == [0.25, 0.5]
    assert run.frame("evaluations")["eval/accuracy"].max() == 0.75
    assert run.frame("samples").groupby("prompt")["reward"].mean().to_dict() == {"ab>": 1.0, "cd>": 0.0}


def test_curves_are_those_that_are_named_or_those_that_matter(folder: Path) -> None:
    run = rft.Run(folder)
    figure: Any = run.plot()
    assert [panel.get_ylabel() for panel in figure.axes] == ["reward/mean", "eval/accuracy"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1.0, 0.25], [2.0, 0.5]]
    named: Any = run.plot("policy/kl")
    assert named.axes[0].lines[0].get_xydata().tolist() == [[2.0, 0.125]], "where a step has the number"
    assert "matplotlib.pyplot" not in sys.modules, "it would keep every figure"


@pytest.mark.parametrize(
    ("names", "do"),
    [(("reward/men",), "run.plot('reward/mean')"), (("reward/mean", "zzzz"), "run.plot('reward/mean')")],
)
def test_a_curve_that_is_not_there_is_told(folder: Path, names: tuple[str, ...], do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        rft.Run(folder).plot(*names)
    assert (caught.value.problem.code, caught.value.problem.do) == ("run.no_curve", do)


def test_a_run_without_steps_has_no_curves(folder: Path) -> None:
    write(folder / "metrics.jsonl", [])
    write(folder / "evals.jsonl", [])
    with pytest.raises(OptionsError) as caught:
        rft.Run(folder).plot()
    assert "no steps yet" in caught.value.problem.what
    assert caught.value.problem.do == "plot it again after its first step"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that were exported, in place of an export."""
    asked: list[Path] = []

    def export(source: Path, target: Path) -> None:
        asked.append(source)
        target.mkdir(parents=True)
        (target / "here").touch()

    monkeypatch.setattr(export_module, "export", export)
    monkeypatch.setattr(transformers_loading, "plain_model", lambda path: [entry.name for entry in path.iterdir()])
    return asked


def test_a_model_is_that_of_the_newest_checkpoint_or_of_a_step(folder: Path, exported: list[Path]) -> None:
    run = rft.Run(folder)
    assert run.model() == ["here"]
    assert run.model(0) == ["here"]
    assert exported == [folder, folder / "checkpoints" / "step_000000"]
    assert run.export(folder.parent / "out", step=2) == folder.parent / "out"
    assert (folder.parent / "out" / "here").is_file()


def test_a_step_without_a_checkpoint_is_told_with_the_nearest(folder: Path, exported: list[Path]) -> None:
    for step, do in ((1, "step=0"), (9, "step=2")):
        with pytest.raises(OptionsError) as caught:
            rft.Run(folder).model(step)
        assert (caught.value.problem.code, caught.value.problem.do) == ("run.no_such_checkpoint", do)
    assert exported == []
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(OptionsError) as caught:
        rft.Run(folder).model(1)
    assert caught.value.problem.do == "run.resume() trains until it saves"


def test_a_place_without_a_run_is_told_with_the_nearest_run(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        rft.Run(folder.parent / "reversl")
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("run.none", f"rft.Run('{folder}')")
    (folder.parent / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        rft.Run(folder.parent / "empty")
    assert caught.value.problem.what == f"no run at {folder.parent / 'empty'}"
    assert caught.value.problem.do == f"rft.Run('{folder}')"
    inside = folder / "checkpoints" / "step_000002" / "model"
    with pytest.raises(DataError) as caught:
        rft.Run(inside)
    assert caught.value.problem.do == f"rft.Run('{folder}')"
    assert caught.value.problem.why.endswith(f"part of the run {folder}")
    with pytest.raises(DataError) as caught:
        rft.Run(folder.parent / "empty" / "run")
    assert caught.value.problem.do == "rft.Run with the directory that save_path has named"


@pytest.mark.parametrize(
    ("package", "call"), [("pandas", lambda run: run.frame()), ("matplotlib", lambda run: run.plot())]
)
def test_a_package_that_is_not_there_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, call: Callable[[rft.Run], object]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        call(rft.Run(folder))
    assert caught.value.problem.do == f"uv pip install {package}"


def test_the_import_of_the_package_loads_no_torch() -> None:
    code = "import sys, rft; rft.Run; assert not {'torch', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        _ = rft.Walk  # type: ignore[attr-defined]
    assert library.Run is rft.Run


def test_methods_of_other_trainers_are_answered_with_the_call(folder: Path) -> None:
    run: Any = rft.Run(folder)
    calls = {"save_model": "run.export", "push_to_hub": f"rft-train export {folder} ", "train": "run.resume"}
    for name, instead in calls.items():
        with pytest.raises(AttributeError, match=f"; use {instead}"):
            getattr(run, name)
    assert not hasattr(run, "nothing")
