"""Sink of records to MLflow: a tracking server, or a database of the run itself."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, sample_table, scalars
from rft_trainer.sinks.extras import import_extra

_RUN_TAG = "rft.run"
_NOT_OF_A_NAME = re.compile(r"[^0-9A-Za-z_\-. :/]")


def mlflow_name(name: str) -> str:
    """Return the name of a metric as MLflow takes it: what it refuses, such as the "@" of "eval/pass@4", is "_"."""
    return _NOT_OF_A_NAME.sub("_", name)


class MlflowSink:
    """Sink to one MLflow run of an experiment.

    The server is that of the variable MLFLOW_TRACKING_URI; without it records go to `mlflow/mlflow.db` in the run's
    directory. A run is found again by the name of its directory, so that a resumed one goes on in place.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._mlflow = import_extra("mlflow", extra="mlflow", flag="--use_mlflow")
        self._entities = import_extra("mlflow.entities", extra="mlflow", flag="--use_mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            import_extra("sqlalchemy", extra="mlflow", flag="--use_mlflow")
        self._client: Any = None
        self._run = ""

    def start(self, info: RunInfo) -> None:
        """Open the run, or the one that has its name; the settings are written once, since MLflow refuses others."""
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        folder = info.directory / "mlflow"
        if not server:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
        known = self._client.get_experiment_by_name(self._experiment)
        location = {} if server else {"artifact_location": (folder / "artifacts").resolve().as_uri()}
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment, **location)
        # a digest, since MLflow's filters have no way to write a quotation mark
        tag = hashlib.blake2b(info.name.encode(), digest_size=16).hexdigest()
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_RUN_TAG}` = '{tag}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.set_terminated(self._run, "RUNNING")
            return
        made = self._client.create_run(experiment, run_name=info.name, tags={_RUN_TAG: tag})
        self._run = made.info.run_id
        settings = [self._entities.Param(mlflow_name(str(name)), str(value)) for name, value in info.config.items()]
        for start in range(0, len(settings), 100):  # as many as one request takes
            self._client.log_batch(self._run, params=settings[start : start + 100])

    def step(self, record: Mapping[str, Any]) -> None:
        self._log(scalars(record), record["step"])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._log(evaluation_scalars(record), record["step"])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = sample_table(rows)
        self._client.log_dict(self._run, {"columns": columns, "data": cells}, f"samples/step_{step:06d}.json")

    def finish(self, summary: Mapping[str, Any]) -> None:
        ended = summary.get("outcome") in (None, "finished")
        self._client.set_terminated(self._run, "FINISHED" if ended else "FAILED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[start : start + 1000])
