"""The trackers themselves, without a network: what a run tells them is read back from their files.

Each needs its extra and is left out without it; `ci/trackers.sh` installs all four.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.metrics.sink import RunInfo, Sink
from rft_trainer.sinks.mlflow import MlflowSink
from rft_trainer.sinks.tensorboard import TensorboardSink
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import WandbSink

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2 | <b>x</b>\n", "label": "2", "reward": 1.0, "num_tokens": 3, "sample": 0},
    {"prompt": "1+1=", "response": "three", "label": {"all": ["2"]}, "reward": None, "num_tokens": 1, "sample": 1},
]


def play(sink: Sink, directory: Path, steps: tuple[int, ...], resumed: int | None = None) -> None:
    """Tell a run of these steps; each has a reward of a tenth of its number, and one evaluation is behind it."""
    directory.mkdir(parents=True, exist_ok=True)
    sink.start(RunInfo("fox's", directory, {"lr": 0.1, "prompt_data": "a.jsonl"}, resumed))
    for step in steps:
        sink.step({"step": step, "reward/mean": step / 10, "kl": float("nan")})
        sink.samples(step, ROWS)
    sink.evaluation({"step": steps[-1], "eval/pass@4": 0.75})
    sink.finish({"outcome": "finished"})


def test_mlflow_has_metrics_settings_and_samples_and_a_resumed_run_goes_on_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    pytest.importorskip("sqlalchemy", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    play(MlflowSink("ours"), tmp_path / "run", (1, 2))
    play(MlflowSink("ours"), tmp_path / "run", (3,), resumed=2)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (run.info.run_name, run.info.status) == ("fox's", "FINISHED")
    assert run.data.params == {"lr": "0.1", "prompt_data": "a.jsonl"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.data.metrics["eval/pass_4"] == 0.75
    kept = tmp_path / "run" / "mlflow" / "artifacts" / run.info.run_id / "artifacts" / "samples"
    table = json.loads((kept / "step_000003.json").read_text())
    assert [dict(zip(table["columns"], row, strict=True))["response"] for row in table["data"]] == [
        "2 | <b>x</b>\n",
        "three",
    ]


def test_tensorboard_has_scalars_and_samples_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(TensorboardSink(), tmp_path, (1, 2))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2)]
    (_, last) = events.Tensors("samples/text_summary")
    text = last.tensor_proto.string_val[0].decode()
    assert "2 &#124; &lt;b&gt;x&lt;/b&gt;<br>" in text
    assert len(text.splitlines()) == 2 + len(ROWS)


def test_wandb_has_metrics_and_samples_in_the_files_of_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off")):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    play(WandbSink("ours", run_name="first"), tmp_path / "run", (1, 2))
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    assert all(name in log.read_bytes() for name in (b"reward/mean", b"eval/pass@4"))
    tables = [json.loads(file.read_text()) for file in sorted(folder.rglob("*.table.json"))]
    assert len(tables) == 2
    assert tables[0]["columns"][:3] == ["prompt", "response", "label"]
    assert [row[1] for row in tables[0]["data"]] == ["2 | <b>x</b>\n", "three"]


def test_trackio_has_metrics_and_samples_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs the extra trackio")
    play(TrackioSink("ours"), tmp_path / "run", (1, 2))
    found = b"".join(file.read_bytes() for file in sorted((tmp_path / "trackio").rglob("*")) if file.is_file())
    assert b"reward/mean" in found
    assert b"eval/pass@4" in found
    assert b"three" in found
