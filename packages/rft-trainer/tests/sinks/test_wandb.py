"""A run at Weights & Biases: which run it is, where it lies, how it ended, and the names that are taken for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.sinks.wandb import DEFAULT_PROJECT, WandbSink, wandb_name


class OpenedRun:
    """A run of the tracker; keeps what it was opened with and how it was ended."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> OpenedRun:
        self.opened = options
        return self

    def define_metric(self, name: str, **options: Any) -> None: ...

    def finish(self, *, exit_code: int | None = None) -> None:
        self.exit_codes.append(-1 if exit_code is None else exit_code)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedRun:
    run, module = OpenedRun(), ModuleType("wandb")
    module.init = run.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return run


def test_a_run_has_the_name_of_its_directory_and_lies_in_it(opened: OpenedRun, tmp_path: Path) -> None:
    WandbSink(True).start(RunInfo("n" * 130, tmp_path, {"lr": 0.1}, None))
    assert opened.opened == {
        "project": DEFAULT_PROJECT,
        "entity": None,
        "group": None,
        "name": "n" * 130,
        "id": "n" * 128,  # the longest id that is taken
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"lr": 0.1},
    }


def test_names_of_the_settings_stand_for_organisation_group_and_run(opened: OpenedRun, tmp_path: Path) -> None:
    WandbSink("ours", entity="org", group="sweep", run_name="first").start(RunInfo("fox", tmp_path, {}, None))
    kept = {name: opened.opened[name] for name in ("project", "entity", "group", "name", "id")}
    assert kept == {"project": "ours", "entity": "org", "group": "sweep", "name": "first", "id": "fox"}


def test_a_name_that_is_no_id_gets_one_of_its_own(opened: OpenedRun, tmp_path: Path) -> None:
    ids: list[str] = []
    for name in ("it's", "it:s", "its", "x" * 200 + ":"):
        WandbSink("ours").start(RunInfo(name, tmp_path, {}, None))
        ids.append(opened.opened["id"])
    assert ids[2] == "its"
    assert len(set(ids)) == 4
    assert not any(set(":;,#?/'") & set(found) for found in ids)
    assert all(len(found) <= 128 for found in ids)


@pytest.mark.parametrize(
    ("summary", "code"),
    [({"outcome": "finished"}, 0), ({}, 0), ({"outcome": "failed"}, 1), ({"outcome": "stopped"}, 1)],
)
def test_a_run_that_did_not_finish_is_shown_as_failed(
    opened: OpenedRun, tmp_path: Path, summary: dict[str, Any], code: int
) -> None:
    sink = WandbSink("ours")
    sink.start(RunInfo("fox", tmp_path, {}, None))
    sink.finish({"eval": {"accuracy": 0.5}, **summary})
    assert opened.exit_codes == [code]
    assert opened.summary == {"eval/accuracy": 0.5}


@pytest.mark.parametrize("option", ["entity", "group", "run_name"])
def test_a_bad_name_is_refused_under_the_flag_that_gave_it(opened: OpenedRun, option: str) -> None:
    flags = {"entity": "--wandb_org", "group": "--wandb_group", "run_name": "--wandb_run_name"}
    for value, code in (("a/b", "tracker.bad_name"), ("wandb_v1_abc", "tracker.key_as_name")):
        with pytest.raises(OptionsError) as caught:
            WandbSink("ours", **{option: value})
        assert (caught.value.problem.code, caught.value.problem.where) == (code, flags[option])


def test_a_name_may_have_128_characters_and_a_blank_one_is_the_default() -> None:
    assert wandb_name("x" * 128) == "x" * 128
    assert wandb_name(" " * 3) == DEFAULT_PROJECT
    for character in "/\\#?%:":
        with pytest.raises(OptionsError) as caught:
            wandb_name(f"a{character}b")
        assert caught.value.problem.do == "--use_wandb a-b"
