"""What the settings keep in host memory is found there after the first update, or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rft_core.errors import OptionsError
from rft_dist.collectives import SingleProcess
from rft_dist.optim.placement import require_on_host
from rft_dist.strategies import optimizer as optimizers
from rft_dist.strategies.data_parallel import DataParallelOptimizer

DEVICE = torch.device("meta")
"""Memory that is not the host's, which a machine without a GPU has as well."""


def test_tensors_that_are_elsewhere_are_named_with_their_bytes() -> None:
    elsewhere = {f"exp_avg/{name}": torch.empty(2**18, device=DEVICE) for name in "abcd"}
    here = {"exp_avg_sq/a": torch.empty(2**18), "step/a": torch.zeros((), device=DEVICE)}
    with pytest.raises(OptionsError) as caught:
        require_on_host(elsewhere | here, "adam_offload")
    problem = caught.value.problem
    assert problem.code == "strategy.offload_without_effect"
    assert problem.what == (
        "4.0 of 5.0 MiB that --adam_offload keeps in host memory are on meta: "
        "exp_avg/a, exp_avg/b, exp_avg/c and 1 more"
    )
    assert problem.do.startswith("--no-adam_offload")
    require_on_host(here, "adam_offload")


def stepped(steps: int, **options: Any) -> DataParallelOptimizer:
    """An optimizer after so many steps on a matrix."""
    weight = Parameter(torch.ones(4))
    adam: dict[str, Any] = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.0, "max_norm": 1.0}
    made = DataParallelOptimizer([("w", weight)], SingleProcess(), **adam, **options)
    for _ in range(steps):
        made.backward((weight * 2).sum())
        made.step(0.1)
    return made


@pytest.mark.parametrize(
    ("options", "setting"),
    [({"offload": True}, "adam_offload"), ({"host_weights": True}, "fsdp_cpu_offload"), ({}, None)],
)
def test_the_first_update_looks_once(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], setting: str | None
) -> None:
    looked: list[tuple[set[str], str]] = []
    monkeypatch.setattr(optimizers, "require_on_host", lambda tensors, name: looked.append((set(tensors), name)))
    stepped(0, **options)
    assert looked == []
    stepped(2, **options)
    state = {"exp_avg/w", "exp_avg_sq/w", "step/w"}
    weights = {"w"} if "host_weights" in options else set[str]()
    assert looked == ([(state | weights, setting)] if setting else [])


def test_moments_that_an_offload_leaves_on_the_device_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stepped(0, offload=True)
    planted = {"exp_avg/w": torch.ones(4, device=DEVICE)}
    monkeypatch.setattr(made._adamw, "state_tensors", lambda: planted)
    parameter = made._parameters["w"]
    made.backward((parameter * 2).sum())
    with pytest.raises(OptionsError, match="exp_avg/w"):
        made.step(0.1)
