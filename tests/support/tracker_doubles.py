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
    tensorboard.SummaryWriter = Writer
    fakes = {"wandb": wandb, "trackio": trackio, "tensorboard": ModuleType("tensorboard")}
    for name, module in (fakes | {"torch.utils.tensorboard": tensorboard}).items():
        patch.setitem(sys.modules, name, module)
