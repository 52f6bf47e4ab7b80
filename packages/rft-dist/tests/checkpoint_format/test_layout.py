"""Names inside a checkpoints folder, and which entries of one are what."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rft_dist.checkpoint_format import layout
from rft_dist.checkpoint_format.layout import (
    Leftover,
    candidates,
    component_of,
    dead_name,
    is_component_name,
    leftovers,
    parse_step,
    pin_path,
    published,
    quarantine_path,
    replaced_name,
    run_tag,
    staging_name,
    step_name,
    step_of,
)

TAG = hashlib.sha256(b"run-a").hexdigest()[:8]


def test_every_name_tells_step_process_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.os, "getpid", lambda: 412)
    assert run_tag("run-a") == TAG
    assert staging_name(7, "run-a") == f".staging-step_000007-412-{TAG}"
    assert dead_name(7, "run-a") == f"dead_step_000007-412-{TAG}"
    assert replaced_name(7, "run-a") == f"dead_replaced_step_000007-412-{TAG}"
    assert pin_path(Path("a"), 7) == Path("a/step_000007.pin")


@pytest.mark.parametrize("step", [0, 1, 100, 999_999, 1_000_000, 10**15 - 1])
def test_a_step_comes_back_from_its_name(step: int) -> None:
    assert step_name(step).startswith("step_")
    assert len(step_name(step)) == 5 + max(6, len(str(step)))
    assert parse_step(step_name(step)) == step_of(Path("x") / step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step_00001", "step_0000100", "step_100", "step_1000000000000000", "step_000001.pin", "xstep_000001", "step_"],
)
def test_any_other_form_of_a_name_is_no_step(name: str) -> None:
    assert parse_step(name) is None
    assert step_of(Path(name)) is None


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("optimizer", True), ("_a.b-c_9", True), ("a" * 100, True), ("a" * 101, False), ("", False)]
    + [(name, False) for name in (".a", "-a", "a/b", "..", "a b", "a\n", "\u00e4")],
)
def test_the_name_of_a_component_is_no_path(name: str, allowed: bool) -> None:
    assert is_component_name(name) is allowed


@pytest.mark.parametrize(
    "file",
    ["state/opt.v2.safetensors", "state/opt.v2.json", "state/opt.v2/rank_00000-of-00002.safetensors"],
)
def test_a_file_belongs_to_the_component_that_it_is_named_after(file: str) -> None:
    assert component_of(file) == "opt.v2"


def test_a_quarantine_has_a_name_of_its_own_for_every_damaged_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "dead_replaced_step_000007-412-00000000"
    names = ["quarantine_step_000007", "quarantine_step_000007.2", "quarantine_step_000007.3"]
    for name in names:
        free = quarantine_path(path, 7)
        assert free == tmp_path / name
        free.symlink_to("nowhere")  # a link that leads nowhere holds a name as well


def folder(path: Path, *names: str) -> Path:
    """A folder with directories of these names."""
    for name in names:
        (path / name).mkdir(parents=True)
    return path


def test_checkpoints_are_the_published_and_the_displaced_directories(tmp_path: Path) -> None:
    displaced = [f"dead_replaced_step_{step:06d}-412-{TAG}" for step in (1, 3)]
    others = ["step_00009", f"dead_step_000004-412-{TAG}", f".staging-step_000005-412-{TAG}", "quarantine_step_000006"]
    place = folder(tmp_path, "step_000001", "step_000002", *displaced, *others)
    (place / "step_000007").write_text("a file")
    (place / "step_000008").symlink_to("step_000001")
    assert candidates(place) == [(1, place / displaced[0]), (3, place / displaced[1])] + [
        (step, place / f"step_00000{step}") for step in (1, 2)
    ]
    assert published(place) == {
        1: place / "step_000001",
        2: place / "step_000002",
        3: place / displaced[1],
    }
    assert candidates(place / "none") == leftovers(place / "none") == []


def test_what_processes_left_is_known_with_its_step_and_whose_it_is(tmp_path: Path) -> None:
    mine = {
        f".staging-step_000005-412-{TAG}": (5, 412, False),
        f"dead_replaced_step_000003-9-{TAG}": (3, 9, True),
        f"dead_step_1000000-412-{TAG}": (1_000_000, 412, False),
    }
    others = ["step_000001", "quarantine_step_000001", f"dead_step_000004-412-{TAG}0", "dead_step_000004-412-zz345678"]
    others += [f"staging-step_000005-412-{TAG}", f"dead_step_000004-1234567890-{TAG}", f"dead_step_00004-412-{TAG}"]
    place = folder(tmp_path, *mine, *others)
    found = leftovers(place)
    assert found == [Leftover(place / name, step, pid, TAG) for name, (step, pid, _) in mine.items()]
    assert [each.is_replaced for each in found] == [is_replaced for _, _, is_replaced in mine.values()]
