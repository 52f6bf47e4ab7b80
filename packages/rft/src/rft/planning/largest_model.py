"""The largest model of a family that a run trains on a card of some memory, predicted by formula: nothing is run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.planning.fit_ladder import HEADROOM
from rft.planning.known_models import FAMILIES
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft.planning.workload import Workload
from rft.resolved import Resolved


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Memory of one model under the settings of a run."""

    name: str
    parameters: int
    peak_bytes: int
    """Of a rank, with the flags."""
    flags: str
    """Flags to add, with which it needs so much; empty = as it is."""
    fits: bool


def fits_of_family(
    family: str, request: PlanRequest, resolve: Callable[[Path], Resolved[Any]], workload: Workload
) -> Iterator[ModelFit]:
    """Yield the models of a family from the smallest to the first that does not fit.

    Args:
        family: one of `FAMILIES`.
        request: machines, with the GiB of a GPU.
        resolve: settings of the run with the model in a directory.
        workload: of the command.
    """
    for name, config in FAMILIES[family].items():
        with config_directory(config) as directory:
            fit = _fit(name, plan_run(replace(request, traced=False), resolve(directory), workload))
        yield fit
        if not fit.fits:
            return


@contextmanager
def config_directory(config: Any) -> Generator[Path]:
    """Write a config.json into a directory of its own while the block runs."""
    with tempfile.TemporaryDirectory(prefix="rft-plan-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        yield Path(folder)


def _fit(name: str, plan: RunPlan) -> ModelFit:
    assert plan.gpu_memory is not None
    training, flags = plan.training_bytes, ""
    if plan.ladder is not None:
        training, flags = plan.ladder.training_bytes, plan.ladder.flags
    peak = max(training, plan.rollout_bytes)
    fits = peak <= plan.gpu_memory * 2**30 * (1 - HEADROOM)
    return ModelFit(name, plan.parameters, peak, flags, fits)
