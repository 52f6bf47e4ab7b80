"""Stand-ins for the trackers, for tests that look at what a run tells them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install_trackers(keep: Callable[[str, Any], None], patch: pytest.MonkeyPatch) -> None:
    """Modules in the place of the trackers; `keep` gets the name of each and what it is told."""
    wandb: Any
    trackio: Any
    tensorboard: Any
    wandb, trackio, tensorboard = ModuleType("wandb"), ModuleType("trackio"), ModuleType("torch.utils.tensorboard")
    silent = SimpleNamespace(
        log=lambda *_, **__: None, define_metric=lambda *_, **__: None, summary={}, finish=lambda *_, **__: None
    )

    def init(tracker: str, *words: Any, **options: Any) -> Any:
        told = {key: options.get(key) for key in ("project", "entity", "group", "name")}
        keep(tracker, told)
        return silent

    class Writer:
        def __init__(self, log_dir: str, **_: Any) -> None:
            keep("tensorboard", log_dir)

        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *_, **__: None

    wandb.init, trackio.init = partial(init, "wandb"), partial(init, "trackio")
    trackio.log, trackio.finish = silent.log, silent.finish
    wandb.Table = trackio.Table = lambda **_: None
    tensorboard.SummaryWriter = Writer
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: keep("mlflow", name),
        create_experiment=lambda *_, **__: "1",
        search_runs=lambda *_, **__: [],
        create_run=lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="1")),
        log_batch=silent.log,
        log_dict=silent.log,
        set_terminated=silent.log,
    )
    mlflow: Any = ModuleType("mlflow")
    entities: Any = ModuleType("mlflow.entities")
    mlflow.MlflowClient = lambda _: client
    entities.Metric = entities.Param = lambda *_: None
    for module in (mlflow, entities, ModuleType("sqlalchemy")):
        patch.setitem(sys.modules, module.__name__, module)
    fakes = {"wandb": wandb, "trackio": trackio, "tensorboard": ModuleType("tensorboard")}
    for name, module in (fakes | {"torch.utils.tensorboard": tensorboard}).items():
        patch.setitem(sys.modules, name, module)
