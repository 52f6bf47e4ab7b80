"""The trackers that a run's settings ask for."""

from __future__ import annotations

from rft_trainer.metrics.sink import Sink
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.settings.run import TENSORBOARD_IN_RUN, RunSettings
from rft_trainer.sinks.mlflow import MlflowSink
from rft_trainer.sinks.optional import OptionalSink
from rft_trainer.sinks.tensorboard import TensorboardSink
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import WandbSink


def requested_trackers(run: RunSettings, files: OptionalFiles) -> list[Sink]:
    """Return one sink for each tracker of the settings; `files` counts what they cannot write.

    Raises:
        PreflightError: a tracker is not installed.
        OptionsError: a name that Weights & Biases does not take.
    """
    trackers: dict[str, Sink] = {}
    if run.use_wandb:
        trackers["Weights & Biases"] = WandbSink(
            project=run.use_wandb,
            entity=run.wandb_org or None,
            group=run.wandb_group or None,
            run_name=run.wandb_run_name or None,
        )
    if run.use_tensorboard:
        is_own = run.use_tensorboard == TENSORBOARD_IN_RUN
        trackers["TensorBoard"] = TensorboardSink(None if is_own else run.use_tensorboard)
    if run.use_trackio:
        trackers["Trackio"] = TrackioSink(project=run.use_trackio)
    if run.use_mlflow:
        trackers["MLflow"] = MlflowSink(experiment=run.use_mlflow)
    return [OptionalSink(sink, name, files) for name, sink in trackers.items()]
