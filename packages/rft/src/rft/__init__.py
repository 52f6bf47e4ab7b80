"""The library behind `rft-train`: from settings to a run. Reads no argv, prints nothing, holds no equation.

`rft.grpo`, `rft.rl` and `rft.sft` train, `rft.evaluate` and `rft.generate` use a model, `rft.Run` is a run as an
object (docs/python.md). The import of the package itself loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.library.callbacks import STOP as STOP
    from rft.library.callbacks import Callback as Callback
    from rft.library.inference import EvaluationScores as EvaluationScores
    from rft.library.inference import evaluate as evaluate
    from rft.library.inference import generate as generate
    from rft.library.run import Run as Run
    from rft.library.training_calls import grpo as grpo
    from rft.library.training_calls import rl as rl
    from rft.library.training_calls import sft as sft

__version__ = "0.1.0"
__all__ = ["STOP", "Callback", "EvaluationScores", "Run", "evaluate", "generate", "grpo", "rl", "sft"]

_MODULES = {
    "STOP": "callbacks",
    "Callback": "callbacks",
    "EvaluationScores": "inference",
    "Run": "run",
    "evaluate": "inference",
    "generate": "inference",
    "grpo": "training_calls",
    "rl": "training_calls",
    "sft": "training_calls",
}
"""Where each name is, in `rft.library`; looked up when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rft.library.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
