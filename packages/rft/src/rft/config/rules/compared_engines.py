"""Settings of `conformance` that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import SourcedValues
from rft_core.errors import Problem
from rft_core.nearest_names import nearest_names
from rft_engine.registry import ENGINES, REFERENCE_ENGINE
from rft_engine.settings import ComparedEnginesSettings


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the problems of unknown engine names, and of flags that none of the engines supports."""
    values, make_problem = given.values, given.make_problem
    names = ComparedEnginesSettings(engines=values["engines"]).names
    for name in names:
        if name not in ENGINES:
            near = (nearest_names(name, tuple(ENGINES)) or [REFERENCE_ENGINE])[0]
            why = f"engines are {', '.join(ENGINES)}; nearest: {near}"
            yield make_problem("conformance.unknown_engine", ["engines"], why, f"--engines {near}")
    idle = all(name in ENGINES and ENGINES[name].can.shares_weights for name in names)
    for name, default in (("engine_tp_size", 1), ("engine_mem_util", None), ("engine_fp8", False)):
        if idle and values[name] != default:
            why = "native and hf compute with the trainer's own weights on its device; vllm and sglang take this"
            do = f"--engines {','.join(names)},vllm"
            yield make_problem("conformance.no_effect", [name, "engines"], why, do)
