"""Puts cases to one trainer: cases as JSON on standard input, results as JSON on standard output.

python -m conformance.adapters.peer_runner NAME, with tests/ on the path, in the interpreter that has the
trainer. What trainers print goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import sys
import types
import warnings
from contextlib import redirect_stdout
from typing import Any

STAND_INS = {"openrlhf": ("openrlhf.models.ring_attn_utils", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher")}
"""Modules that a trainer imports beside its formulas, and that want flash-attn (so CUDA) or vLLM."""


class StandIn(types.ModuleType):
    """A module in which every public name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def stand_in(name: str) -> None:
    """Let this name be imported, with whatever is below it."""
    module = StandIn(name)
    module.__path__ = []
    sys.modules[name] = module


def results(name: str, cases: list[dict[str, Any]], dtypes: tuple[str, ...] = ("float64", "float32")) -> dict[str, Any]:
    """Versions, and of every case what came of it in each type."""
    import torch

    for module in STAND_INS.get(name, ()):
        stand_in(module)
    adapter = importlib.import_module(f"conformance.adapters.{name}")
    base = importlib.import_module("conformance.adapters.base")
    found: dict[str, Any] = {}
    for case in cases:
        entry: dict[str, Any] = {}
        for text in dtypes:
            dtype = getattr(torch, text)
            entry[text] = base.outcome(adapter.COMPUTE, adapter.REFUSED, case, dtype)
            also = getattr(adapter, "ALSO", {}).get((case["kind"], case["name"]), {})
            for label, function in also.items():
                entry.setdefault("also", {}).setdefault(label, {})[text] = base.attempt(function, case, dtype)
        found[case["id"]] = entry
    versions = {package: importlib.metadata.version(package) for package in adapter.PACKAGES}
    return {"versions": {"python": platform.python_version(), **versions}, "results": found}


def main() -> None:
    """Read, compute, write."""
    warnings.simplefilter("ignore")
    cases = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        found = results(sys.argv[1], cases)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
