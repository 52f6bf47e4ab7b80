"""The record of a run on disk: read back, damaged, lost, and written together with config.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.identity.record import Identity, RecordedSetting
from rft.identity.storage import (
    config_with,
    manifest_entries,
    read_record,
    restore_config,
    write_record,
)
from rft_core.errors import CheckpointError
from rft_dist.checkpoints.store import CheckpointStore

CONFIG = "# settings\nseed: 3                # command line\n# pretrain: required, not given\n"


def identity(seed: int = 3) -> Identity:
    """A record with one setting."""
    settings = {"seed": RecordedSetting(seed, "command line")}
    return Identity(command="rl", settings=settings, contents={}, versions={})


def save(run: Path, step: int, metadata: dict[str, Any]) -> None:
    store = CheckpointStore(run / "checkpoints", keep_last=None, keep_bytes=None, run_id="run")
    store.save(
        step,
        tensors={"optimizer": {"a": torch.zeros(1)}},
        records={},
        model_writer=lambda path: (path / "config.json").write_text("{}") and None,
        metadata=metadata,
    )


def test_a_record_is_written_with_its_config_and_read_back(tmp_path: Path) -> None:
    write_record(tmp_path, identity(), CONFIG)
    found = read_record(tmp_path)
    assert found is not None
    assert (found.identity, found.config, found.source) == (identity(), CONFIG, tmp_path / "identity.json")
    assert (tmp_path / "config.yaml").read_text() == CONFIG
    assert found.config_is(CONFIG.encode())
    assert not found.config_is(CONFIG.encode() + b" ")


def test_a_directory_without_one_has_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    save(tmp_path, 1, {"config_sha256": "of an earlier version"})
    assert read_record(tmp_path) is None


def test_a_lost_record_is_that_of_the_checkpoint_saved_last(tmp_path: Path) -> None:
    # going back to an earlier step makes the newest checkpoint one of a lower step
    for step, seed in ((9, 1), (5, 2)):
        save(tmp_path, step, manifest_entries(identity(seed), CONFIG))
    (tmp_path / "checkpoints" / "step_000009" / "manifest.json").stat()
    found = read_record(tmp_path)
    assert found is not None
    assert (found.identity, found.config) == (identity(2), None)
    assert found.config_is(CONFIG.encode())
    assert found.source == tmp_path / "checkpoints" / "step_000005" / "manifest.json"
    found.source.write_bytes(b"damaged")
    older = read_record(tmp_path)
    assert older is not None
    assert older.identity == identity(1)


@pytest.mark.parametrize("damage", ["cut", "bit", "zeros", "edited", "list", "huge"])
def test_a_damaged_record_is_told_with_what_to_do(damage: str, tmp_path: Path) -> None:
    write_record(tmp_path, identity(), CONFIG)
    file = tmp_path / "identity.json"
    whole = file.read_bytes()
    edited = json.dumps(json.loads(whole) | {"command": "sft"}).encode()
    damaged = {"cut": whole[:60], "bit": whole.replace(b"rl", b"rk", 1), "zeros": b"\0" * 9, "edited": edited}
    file.write_bytes((damaged | {"list": b"[]", "huge": b" " * (16 * 2**20 + 1)})[damage])
    with pytest.raises(CheckpointError) as caught:
        read_record(tmp_path)
    assert caught.value.problem.code == "identity.damaged"
    assert caught.value.problem.do.startswith(f"mv {file} {file}.damaged")


def test_a_config_that_is_not_there_is_written_again_and_no_other(tmp_path: Path) -> None:
    write_record(tmp_path, identity(), CONFIG)
    found = read_record(tmp_path)
    assert found is not None
    assert not restore_config(tmp_path, found)
    (tmp_path / "config.yaml").unlink()
    assert restore_config(tmp_path, found)
    assert (tmp_path / "config.yaml").read_text() == CONFIG


def test_lines_of_a_config_are_replaced_given_a_value_or_added() -> None:
    lines = "seed: 4   # command line\npretrain: m   # a file\nreward: exact   # a file\nother: 1"
    resolved: Any = SimpleNamespace(config_yaml=lines)
    assert config_with(CONFIG, resolved, ["seed", "pretrain", "reward", "unknown"], 7).splitlines() == [
        "# settings",
        "seed: 4   # command line, at step 7",
        "pretrain: m   # a file, at step 7",
        "reward: exact   # a file, at step 7",
    ]
