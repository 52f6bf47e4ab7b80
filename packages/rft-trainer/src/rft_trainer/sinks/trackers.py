"""The trackers that a run's settings ask for."""

from __future__ import annotations

from pathlib import Path

from rft_trainer.metrics.sink import Sink
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.tensorboard import TensorboardSink
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import WandbSink


def requested_trackers(run: RunSettings) -> list[Sink]:
    """Return one sink for each tracker of the settings.

    Raises:
        PreflightError: a tracker is not installed.
        OptionsError: a name that Weights & Biases does not take.
    """
    trackers: list[Sink] = []
    if run.use_wandb:
        trackers.append(
            WandbSink(
                project=run.use_wandb,
                entity=run.wandb_org or None,
                group=run.wandb_group or None,
                run_name=run.wandb_run_name or None,
            )
        )
    if run.use_tensorboard:
        trackers.append(TensorboardSink(Path(run.use_tensorboard)))
    if run.use_trackio:
        trackers.append(TrackioSink(project=run.use_trackio))
    return trackers
