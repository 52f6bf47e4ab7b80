"""An export beside its place: what is left of it at the end, and how far two policies are apart."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.checkpoints.verified_export import PROBE_TOKENS, differs, logprob_difference, whole_or_not_at_all


def write(staging: Path) -> str:
    staging.mkdir()
    (staging / "file").write_text("x")
    return "written"


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_gets_its_name_when_it_is_whole(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "deep" / "target"
    if exists:
        target.mkdir(parents=True)
    seen: list[Path] = []
    assert whole_or_not_at_all(target, lambda staging: (seen.append(staging), write(staging))[1]) == "written"
    assert seen == [target.with_name(f".target-{os.getpid()}")]
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert (target / "file").read_text() == "x"


def test_a_failure_leaves_nothing_and_a_full_target_stays(tmp_path: Path) -> None:
    def fails(staging: Path) -> None:
        write(staging)
        raise MemoryError

    with pytest.raises(MemoryError):
        whole_or_not_at_all(tmp_path / "target", fails)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "target")
    with pytest.raises(OSError, match="target"):
        whole_or_not_at_all(tmp_path / "target", write)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def policy(values: list[float], *, vocab: int, probes: list[Any]) -> Any:
    def logprobs(tokens: Any) -> Any:
        probes.append(tokens.token_ids_T.tolist())
        return torch.tensor(values, requires_grad=True) * 1.0, None

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocab))
    scored = SimpleNamespace(token_logprobs=logprobs)
    return SimpleNamespace(model=SimpleNamespace(config=config), eval=lambda: scored)


def test_two_policies_are_apart_by_their_largest_difference_over_one_probe() -> None:
    probes: list[Any] = []
    first, second = (policy(values, vocab=7, probes=probes) for values in ([0.0, -1.0, -3.0], [0.5, -1.0, -1.0]))
    assert logprob_difference(first, second) == 2.0
    assert logprob_difference(second, first) == 2.0
    assert probes == [probes[0]] * 4
    assert len(probes[0]) == PROBE_TOKENS
    assert set(probes[0]) == set(range(7))
    assert logprob_difference(first, policy([0.0, float("nan"), 0.0], vocab=7, probes=probes)) != 0.0


def test_an_export_that_differs_names_its_place() -> None:
    error = differs("tensor a", Path("place"))
    assert (error.problem.code, error.problem.what, error.problem.where) == ("export.differs", "tensor a", "place")
