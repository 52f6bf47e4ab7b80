"""Weights of a checkpoint at the start of a run: all of them, those that are named, or none."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.checkpoints import initial_weights
from rft.checkpoints.initial_weights import LoadReport, copy_weights, engine_weights_directory, load_initial_weights
from rft_core.errors import CheckpointError, OptionsError
from rft_dist.settings import CheckpointSettings

ALL = CheckpointSettings(ckpt_path="~/run", ckpt_weights_only=True)


def some(words: str) -> CheckpointSettings:
    return CheckpointSettings(ckpt_path="~/run", ckpt_partial=words)


class Bench:
    """A checkpoint with these tensors; `loaded` are the arguments of its model's loading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **tensors: Any) -> None:
        self.asked: list[Any] = []
        self.loaded: list[Any] = []
        checkpoint = SimpleNamespace(step=7, path=Path("step_7"), model_directory=Path("step_7/model"))

        def resolve(path: Path, asked_by: str) -> Any:
            self.asked.append((path, asked_by))
            return SimpleNamespace(checkpoint=checkpoint)

        def load(folder: Path, **options: Any) -> Any:
            self.loaded.append((folder, options))
            return policy(**tensors)

        monkeypatch.setattr(initial_weights, "resolve_checkpoint", resolve)
        monkeypatch.setattr(initial_weights, "load_policy", load)


def policy(**tensors: Any) -> Any:
    held = {name.replace("__", "."): torch.as_tensor(value) for name, value in tensors.items()}
    return SimpleNamespace(
        model=SimpleNamespace(state_dict=lambda: held), dtype=torch.float32, tokenizer="tokenizer", held=held
    )


def values(given: Any) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in given.held.items()}


OWN: dict[str, Any] = {"a__x": [1.0], "a__y": [2.0, 2.0], "b__x": [3.0]}
OTHER: dict[str, Any] = {"a__x": [10.0], "a__y": [20.0, 20.0], "b__x": [30.0]}


@pytest.mark.parametrize(
    ("settings", "expected", "asked_by"),
    [
        (CheckpointSettings(ckpt_path="~/run"), [1.0, 2.0, 3.0], None),
        (ALL, [10.0, 20.0, 30.0], "--ckpt_weights_only"),
        (some("a."), [10.0, 20.0, 3.0], "--ckpt_partial"),
        (some("b"), [1.0, 2.0, 30.0], "--ckpt_partial"),
        (some(" b.x , a.y,"), [1.0, 20.0, 30.0], "--ckpt_partial"),
    ],
)
def test_the_weights_that_are_named_are_taken(
    monkeypatch: pytest.MonkeyPatch, settings: CheckpointSettings, expected: list[float], asked_by: str | None
) -> None:
    bench, own = Bench(monkeypatch, **OTHER), policy(**OWN)
    load_initial_weights(own, settings, show=False)
    assert [value[0] for value in values(own).values()] == expected
    assert bench.asked == ([(Path("~/run").expanduser(), asked_by)] if asked_by else [])
    options = {"dtype": torch.float32, "tokenizer": "tokenizer"}
    assert bench.loaded == ([(Path("step_7/model"), options)] if asked_by else [])


@pytest.mark.parametrize(
    ("settings", "other", "code"),
    [
        (ALL, {"a__x": [10.0], "a__y": [20.0, 20.0]}, "checkpoint.other_weights"),
        (ALL, OTHER | {"c__x": [1.0]}, "checkpoint.other_weights"),
        (ALL, OTHER | {"b__x": [1.0, 1.0]}, "checkpoint.other_weights"),
        (some(","), OTHER, "checkpoint.partial_names_nothing"),
        (some("a,c"), OTHER, "checkpoint.partial_names_nothing"),
        (some("a,c"), OTHER | {"c__x": [1.0]}, "checkpoint.partial_names_nothing"),
        (some("a,b"), {"a__x": [10.0]}, "checkpoint.partial_names_nothing"),
        (some("a,b"), OTHER | {"b__x": [1.0, 1.0]}, "checkpoint.partial_names_nothing"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: CheckpointSettings, other: dict[str, Any], code: str
) -> None:
    Bench(monkeypatch, **other)
    own = policy(**OWN)
    with pytest.raises(CheckpointError) as caught:
        load_initial_weights(own, settings, show=False)
    assert caught.value.problem.code == code
    assert values(own) == values(policy(**OWN))
    if code == "checkpoint.partial_names_nothing":
        assert caught.value.problem.do == "--ckpt_partial a.x"


@pytest.mark.parametrize(
    ("own", "other", "do"),
    [
        (OWN, OTHER | {"b__x": [1.0, 1.0]}, "--pretrain step_7/model, the model of this checkpoint"),
        (OWN, {"c__x": [1.0]}, "--pretrain step_7/model, the model of this checkpoint"),
        (OWN, {"a__x": [10.0], "a__y": [20.0, 20.0]}, "--ckpt_partial a.x,a.y"),
        (OWN, OTHER | {"c__x": [1.0]}, "--ckpt_partial a.x,a.y,b.x"),
        (
            OWN | {"a__lora_A__w": [[1.0]], "a__lora_B__w": [[1.0]]},
            OTHER | {"a__lora_A__w": [[1.0], [1.0]], "a__lora_B__w": [[1.0, 1.0]]},
            "--lora_rank 2",
        ),
    ],
)
def test_weights_that_do_not_fit_are_answered_with_what_makes_them_fit(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], other: dict[str, Any], do: str
) -> None:
    Bench(monkeypatch, **other)
    with pytest.raises(CheckpointError) as caught:
        load_initial_weights(policy(**own), ALL, show=False)
    assert caught.value.problem.do == do
    with pytest.raises(CheckpointError) as caught:
        copy_weights({"a": torch.zeros(1)}, {"a": torch.zeros(2)}, [""])
    assert caught.value.problem.do == "--ckpt_path of another checkpoint"


def test_some_weights_may_be_missing_or_of_other_shapes_where_only_some_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Bench(monkeypatch, a__x=[10.0], a__y=[1.0], a__z=[1.0])
    own = policy(**OWN)
    with caplog.at_level(logging.INFO):
        load_initial_weights(own, some("a"), show=False)
        assert caplog.records == []
        load_initial_weights(own, some("a"), show=True)
    assert values(own) == {"a.x": [10.0], "a.y": [2.0, 2.0], "b.x": [3.0]}
    [record] = caplog.records
    assert record.getMessage().startswith("weights of step 7 from step_7: 1 loaded")


def test_a_vision_tower_is_called_visual_whatever_a_model_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Bench(monkeypatch, model__vision_tower__x=[10.0], b__x=[30.0])
    own = policy(model__vision_tower__x=[1.0], b__x=[3.0])
    load_initial_weights(own, some("visual"), show=False)
    assert values(own) == {"model.vision_tower.x": [10.0], "b.x": [3.0]}


def test_a_tied_tensor_is_counted_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Bench(monkeypatch, a__x=[10.0])
    own = policy(a__x=[1.0])
    own.held["head"] = own.held["a.x"]
    with caplog.at_level(logging.INFO):
        load_initial_weights(own, ALL, show=True)
    assert values(own) == {"a.x": [10.0], "head": [10.0]}
    assert "1 loaded, 0 missing, 0 unexpected, 0 mismatched, 0 kept" in caplog.records[0].getMessage()


def test_a_report_names_what_was_left() -> None:
    target = {"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(1), "k": torch.zeros(1)}
    source = {"a": torch.ones(1), "b": torch.ones(3), "d": torch.ones(1), "k": torch.ones(1)}
    report = copy_weights(target, source, ["a", "b", "c", "d"])
    assert report == LoadReport(("a",), ("c",), ("d",), ("b [3] for [2]",), 1)
    assert [float(tensor[0]) for tensor in target.values()] == [1.0, 0.0, 0.0, 0.0]
    many = LoadReport((), tuple("wxyz"), tuple("uvw"), (), 0)
    assert "4 missing (w, x, y, ...)" in str(many)
    assert "3 unexpected (u, v, w)" in str(many)


@pytest.mark.parametrize(
    ("settings", "shares", "directory"),
    [
        (CheckpointSettings(), False, "source"),
        (ALL, False, Path("step_7/model")),
        (ALL, True, Path("step_7/model")),
        (some("a"), True, "source"),
        (some("a"), False, None),
    ],
)
def test_an_engine_of_its_own_begins_from_a_directory_that_holds_what_the_policy_has(
    monkeypatch: pytest.MonkeyPatch, settings: CheckpointSettings, shares: bool, directory: Any
) -> None:
    Bench(monkeypatch)
    if directory is None:
        with pytest.raises(OptionsError) as caught:
            engine_weights_directory(settings, "source", shares_weights=shares)
        assert caught.value.problem.code == "checkpoint.partial_engine"
        return
    assert engine_weights_directory(settings, "source", shares_weights=shares) == directory
