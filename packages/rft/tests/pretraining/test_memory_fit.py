"""The ladder applied at the start: what is chosen, what is left alone, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.planning.fit_ladder import fit_ladder
from rft.planning.run_plan import PlanRequest
from rft.pretraining import memory_fit
from rft.pretraining.memory_fit import fitted, fitted_on_all_ranks
from rft.resolved import Origin, Resolved, flat
from rft.settings import PretrainSettings
from rft_dist.planning.memory_estimate import MemoryTerm

GIB = 2**30


@dataclass
class Planner:
    """A run with 1 GiB of weights, 1 GiB of logits a window (half of one in chunks), and activations of 0.5."""

    requests: list[PlanRequest] = field(default_factory=list)

    def __call__(self, request: PlanRequest, resolved: Resolved[Any], workload: object) -> Any:
        self.requests.append(request)
        limit = resolved.values["memory_limit_gb"]

        def terms(changes: Any) -> list[MemoryTerm]:
            now = {**resolved.values, **changes}
            rows, kept = now["micro_train_batch_size"], 0.1 if now["gradient_checkpointing"] else 0.5
            sizes = {
                "parameters": 1.0,
                "activations": rows * kept,
                "logits": 0.5 if now["fused_linear_logprob"] else rows,
            }
            return [MemoryTerm(name, int(size * GIB), "") for name, size in sizes.items()]

        def bytes_with(changes: Any) -> int:
            return sum(term.num_bytes for term in terms(changes))

        total = bytes_with({})
        ladder = fit_ladder(resolved.values, total, limit, bytes_with, fixed=request.fixed)
        return SimpleNamespace(terms=terms({}), training_bytes=total, ladder=ladder)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    made = Planner()
    monkeypatch.setattr(memory_fit, "plan_run", made)
    return made


def asked(**given: Any) -> Resolved[PretrainSettings]:
    settings = PretrainSettings()
    values = flat(settings)
    origins = dict.fromkeys(values, Origin("default"))
    empty = Resolved("pretrain", settings, values, origins, "", tuple[Path, ...](), (), "")
    return empty.with_values(given, Origin("command line"))


def machine(device: str = "cpu", limits: tuple[int, ...] = ()) -> Any:
    gather = [str(limit).encode() for limit in limits]
    collectives = SimpleNamespace(gather_bytes=lambda data: gather or [data])
    return SimpleNamespace(
        device=device, collectives=collectives, ranks=SimpleNamespace(world_size=max(len(limits), 1))
    )


def test_the_cheapest_changes_that_fit_are_made_and_the_batch_stays(planner: Planner) -> None:
    before = asked(memory_limit_gb=5)
    found = fitted(before, machine())
    changed = {name for name in found.values if found.values[name] != before.values[name]}
    assert changed == {"fused_linear_logprob", "micro_train_batch_size"}
    assert (found.settings.model.fused_linear_logprob, found.settings.training.micro_train_batch_size) == (True, 4)
    assert str(found.origins["micro_train_batch_size"]) == "fit: 5 GiB"
    assert found.notes == (
        "fit: a step takes 13.00 GiB of 4.50 (5 without 10%); the largest part is logits, 8.00 GiB",
        "fit: 5.50 GiB with --fused_linear_logprob "
        "(logits of a chunk of rows at a time; one more product with the head)",
        "fit: 3.50 GiB with --micro_train_batch_size 4 (more and smaller forwards; the batch of a step stays)",
        "fit: fused_linear_logprob = true (fit: 5 GiB)",
        "fit: micro_train_batch_size = 4 (fit: 5 GiB)",
    )


def test_what_is_given_is_not_changed_and_what_is_left_is_said(planner: Planner) -> None:
    before = asked(memory_limit_gb=2, micro_train_batch_size=8, gradient_checkpointing=False)
    found = fitted(before, machine())
    assert found.values["fused_linear_logprob"]
    assert found.values["micro_train_batch_size"] == 8
    assert not found.values["gradient_checkpointing"]
    assert found.notes[-1].startswith("fit: 5.50 GiB exceed the limit, and what is given was not changed")


def test_a_step_that_fits_changes_nothing(planner: Planner) -> None:
    before = asked(memory_limit_gb=99)
    found = fitted(before, machine())
    assert found.values == before.values
    assert replace(found, notes=()) == before


@pytest.mark.parametrize("given", [{}, {"fit_memory": "off"}])
def test_without_a_limit_nothing_is_planned(planner: Planner, given: dict[str, Any]) -> None:
    before = asked(**given)
    assert fitted(before, machine()) is before
    assert planner.requests == []


def test_ranks_agree_on_the_least_memory(planner: Planner) -> None:
    found = fitted_on_all_ranks(asked(), machine(limits=(99, 5, 0)))
    assert found.values["micro_train_batch_size"] == 4
    assert planner.requests[0].numbers == {"world_size": 3}
