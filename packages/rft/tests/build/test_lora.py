"""Adapters from settings: which weights they stand on, what a checkpoint gives them, and when their masks change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import lora
from rft_core.errors import CheckpointError, DataError
from rft_models.settings import AdapterSettings

NONE = AdapterSettings()
SOME = replace(NONE, lora_rank=4)


@pytest.fixture
def restored(tmp_path: Path) -> Any:
    """A checkpoint with adapters."""
    (tmp_path / "model" / lora.files.FOLDER).mkdir(parents=True)
    return SimpleNamespace(model_directory=tmp_path / "model", step=7)


def test_rules_are_those_of_the_settings() -> None:
    assert lora.rules_of(NONE) is None
    rules: Any = lora.rules_of(replace(SOME, lora_alpha=5, lora_dropout=0.25, target_modules="q_proj"))
    assert rules.rank == 4
    assert rules.dropout == 0.25


def test_a_fresh_run_is_loaded_from_what_it_was_given_and_others_from_their_checkpoint(restored: Any) -> None:
    assert lora.weights_directory(SOME, "m", None) == "m"
    assert lora.weights_directory(NONE, "m", restored) == restored.model_directory


def test_with_adapters_the_base_is_loaded_wherever_it_is(restored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(lora.files, "base_directory", lambda folder: (asked.append(folder), "base")[1])
    assert lora.weights_directory(SOME, "m", restored) == "base"
    assert asked == [restored.model_directory / lora.files.FOLDER]

    def moved(folder: Path) -> Path:
        raise DataError(code="a.b", what="w", where="h", why="y")

    monkeypatch.setattr(lora.files, "base_directory", moved)
    assert lora.weights_directory(SOME, "m", restored) == "m"
    (restored.model_directory / lora.files.FOLDER).rmdir()
    with pytest.raises(CheckpointError) as caught:
        lora.weights_directory(SOME, "m", restored)
    assert caught.value.problem.code == "adapters.none_saved"


class Policy:
    """Notes what is done with it."""

    def __init__(self, pending: object | None = None) -> None:
        self.pending_weights, self.verified = pending, 0

    def verify(self) -> None:
        self.verified += 1


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was done with adapters, in order."""
    found: list[Any] = []
    monkeypatch.setattr(
        lora,
        "add_adapters",
        lambda model, rules, **options: (found.append(("add", rules.rank, options)), "adapters")[1],
    )
    monkeypatch.setattr(lora.files, "load", lambda adapters, folder: found.append(("load", adapters, folder)))
    return found


def adapt(policy: Any, settings: AdapterSettings, restored: Any) -> None:
    lora.adapt(policy, settings, restored, base="b", seed=3)


def test_without_a_rank_a_policy_is_left_alone(done: list[Any], restored: Any) -> None:
    adapt(Policy(), NONE, restored)
    lora.adapt_critic(SimpleNamespace(), NONE, seed=3)  # type: ignore[arg-type]
    assert done == []


def test_a_critic_has_adapters_of_its_own(done: list[Any]) -> None:
    lora.adapt_critic(SimpleNamespace(), SOME, seed=5)  # type: ignore[arg-type]
    assert done == [("add", 4, {"seed": 5})]


def test_the_rate_of_a_step_begins_its_masks() -> None:
    begun: list[int] = []

    def schedule(update: int) -> float:
        return 0.5 * update

    rate = lora.counting(SimpleNamespace(has_masks=True, begin_update=begun.append), schedule)  # type: ignore[arg-type]
    assert [rate(update) for update in (0, 3)] == [0.0, 1.5]
    assert begun == [0, 3]
    assert lora.counting(SimpleNamespace(has_masks=False), schedule) is schedule  # type: ignore[arg-type]


def test_a_preview_names_the_adapters_and_nothing_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "preview", lambda pretrain, rules, part_of: [f"{part_of(pretrain)} {rules.rank}"])
    assert lora.preview_adapters(NONE, "m") == []
    assert lora.preview_adapters(SOME, "m") == ["m 4"]
    assert lora.preview_adapters(SOME, "m", lambda model: f"part of {model}") == ["part of m 4"]
