"""Saving and finding checkpoints when nothing goes wrong, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft_core.errors import CheckpointError, OptionsError, StorageError
from rft_dist.checkpoint_format.layout import published
from rft_dist.checkpoint_format.manifest import parse_manifest
from rft_dist.checkpoint_format.safetensors_pieces import file_pieces
from rft_dist.checkpoints import store as stores
from rft_dist.checkpoints import writer
from rft_dist.checkpoints.rank_writer import write_rank
from rft_dist.checkpoints.store import CheckpointStore


def test_everything_saved_comes_back_to_the_bit(small_run) -> None:
    store = small_run.store()
    info = small_run.save(store, 100, config_sha256="ab", episode=2)
    found = small_run.store().newest_verified()
    assert found.checkpoint is not None
    assert found.findings == ()
    assert small_run.state_of(found.checkpoint) == (100, 0)
    assert found.checkpoint.manifest.metadata["config_sha256"] == "ab"
    assert found.checkpoint.manifest.metadata["versions"]["safetensors"] == version("safetensors")
    assert info.path.name == "step_000100"
    assert info.num_bytes == sum(path.stat().st_size for path in info.path.rglob("*") if path.is_file())


def test_the_manifest_gives_the_plain_sha256_of_every_file(small_run) -> None:
    info = small_run.save(small_run.store(), 3)
    manifest = parse_manifest((info.path / "manifest.json").read_bytes())
    on_disk = {path.relative_to(info.path).as_posix() for path in info.path.rglob("*") if path.is_file()}
    assert {entry.path for entry in manifest.files} == on_disk - {"manifest.json"}
    for entry in manifest.files:
        content = (info.path / entry.path).read_bytes()
        assert (entry.digest.size, entry.digest.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tensor_files_are_safetensors_of_any_layout_and_dtype(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "transposed": shared.T,
        "view": shared[1:],
        "scalar": torch.tensor(2**40),
        "half": torch.tensor([1.5, -0.0, math.inf]).to(torch.float16),
        "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "nan": torch.tensor([math.nan], dtype=torch.float64),
        "none": torch.empty(2, 0),
    }
    content = b"".join(bytes(piece) for piece in file_pieces(tensors))
    (tmp_path / "t.safetensors").write_bytes(content)
    loaded = load_file(tmp_path / "t.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )


def test_the_same_state_gives_the_same_bytes(small_run) -> None:
    store = small_run.store()
    first = small_run.save(store, 5)
    digests = [entry.digest for entry in store.open(5).manifest.files]
    small_run.save(store, 5)
    assert [entry.digest for entry in store.open(first.path).manifest.files] == digests


def test_newest_is_the_one_saved_last_even_after_going_back(small_run) -> None:
    store = small_run.store()
    for step in (10, 20, 30):
        small_run.save(store, step)
    again = small_run.store()
    again.open(10)
    small_run.save(again, 15, salt=1)
    checkpoint = small_run.store().newest_verified().checkpoint
    assert checkpoint is not None
    assert small_run.state_of(checkpoint) == (15, 1)
    assert checkpoint.manifest.parent_step == 10
    assert [info.step for info in store.list()] == [10, 20, 30, 15]


def test_a_second_save_of_a_step_replaces_the_first(small_run) -> None:
    store = small_run.store()
    small_run.save(store, 7, salt=1)
    small_run.save(store, 7, salt=2)
    assert small_run.state_of(store.open(7)) == (7, 2)
    assert small_run.names() == ["step_000007"]


def test_a_save_of_a_step_whose_directory_is_damaged_keeps_the_damaged_one_aside(small_run) -> None:
    store = small_run.store()
    info = small_run.save(store, 7, salt=1)
    (info.path / "model" / "config.json").write_text("rotten")
    small_run.save(store, 7, salt=2)
    assert small_run.state_of(store.open(7)) == (7, 2)
    assert (small_run.directory / "quarantine_step_000007" / "model" / "config.json").read_text() == "rotten"


def test_a_step_of_another_run_is_not_replaced(small_run) -> None:
    info = small_run.save(small_run.store(run_id="other"), 7)
    before = {path: path.read_bytes() for path in info.path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        small_run.save(small_run.store(), 7)
    assert caught.value.problem.code == "checkpoint.step_of_another_run"
    assert {path: path.read_bytes() for path in info.path.rglob("*") if path.is_file()} == before
    assert small_run.names() == ["step_000007"]


def test_a_run_does_not_resume_from_another_run_in_its_folder(small_run) -> None:
    small_run.save(small_run.store(), 5)
    small_run.save(small_run.store(run_id="other"), 9)
    checkpoint = small_run.store().newest_verified().checkpoint
    assert checkpoint is not None
    assert checkpoint.step == 5


def test_a_save_that_lacks_a_registered_component_is_refused_and_names_it(small_run) -> None:
    store = small_run.store()
    with pytest.raises(CheckpointError, match=r"schedule.*replay") as caught:
        store.save(
            1,
            tensors=small_run.tensors(1),
            records={"ledger": {}, "replay": {}},
            model_writer=small_run.model_writer(1),
            metadata={},
        )
    assert caught.value.problem.code == "checkpoint.components_differ"
    assert small_run.names() == []


def test_opening_with_other_components_than_saved_is_refused_and_names_them(small_run) -> None:
    small_run.save(small_run.store(), 1)
    components = ("optimizer", "ledger", "scaler")
    store = CheckpointStore(small_run.directory, keep_last=None, keep_bytes=None, run_id="run-a", components=components)
    with pytest.raises(CheckpointError, match=r"scaler.*schedule") as caught:
        store.open(1)
    assert caught.value.problem.code == "checkpoint.components_differ"
    with pytest.raises(CheckpointError, match="scaler") as caught:
        store.newest_verified()
    assert caught.value.problem.code == "checkpoint.components_differ"


def test_a_component_that_was_not_saved_is_named(small_run) -> None:
    small_run.save(small_run.store(), 1)
    checkpoint = small_run.store().open(1)
    assert not checkpoint.has_records("optimizer")
    with pytest.raises(CheckpointError, match=r"state/ema\.safetensors") as caught:
        checkpoint.tensors("ema")
    assert caught.value.problem.code == "checkpoint.component_missing"


@pytest.mark.parametrize("value", [{1: "a"}, {"a": math.nan}, {"a": b"bytes"}, {"a": {"b": [{2: 3}]}}])
def test_a_record_that_json_cannot_hold_is_refused_before_anything_is_written(small_run, value) -> None:
    store = small_run.store()
    with pytest.raises(CheckpointError, match="'ledger'") as caught:
        store.save(
            1,
            tensors=small_run.tensors(1),
            records={"ledger": value, "schedule": {}},
            model_writer=small_run.model_writer(1),
            metadata={},
        )
    assert caught.value.problem.code == "checkpoint.bad_component"
    assert small_run.names() == []


@pytest.mark.parametrize("name", ["../ledger", "a/b", ".hidden", ""])
def test_a_component_name_that_is_a_path_is_refused(small_run, name) -> None:
    store = CheckpointStore(small_run.directory, keep_last=None, keep_bytes=None, run_id="run-a")
    with pytest.raises(CheckpointError) as caught:
        store.save(1, tensors={}, records={name: {}}, model_writer=small_run.model_writer(1), metadata={})
    assert caught.value.problem.code == "checkpoint.bad_component"
    assert small_run.names() == []


def test_a_link_in_the_model_directory_is_refused(small_run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not of this run")
    store = small_run.store()
    small_run.save(store, 1)

    def write(directory: Path) -> None:
        (directory / "weights").symlink_to(secret)

    with pytest.raises(StorageError, match="step 2") as caught:
        store.save(2, tensors=small_run.tensors(2), records=small_run.records(2), model_writer=write, metadata={})
    assert caught.value.problem.code == "checkpoint.save_refused"
    assert small_run.names() == ["step_000001"]
    assert secret.read_text() == "not of this run"


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(small_run) -> None:
    store = small_run.store()
    small_run.save(store, 4)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .* there are \[4\]") as caught:
        store.open(5)
    assert caught.value.problem.code == "checkpoint.no_such_step"


@pytest.mark.parametrize(("keep_last", "keep_bytes"), [(0, None), (None, 0), (-1, None)])
def test_limits_below_one_are_refused(small_run, keep_last, keep_bytes) -> None:
    with pytest.raises(OptionsError, match="keep_") as caught:
        small_run.store(keep_last=keep_last, keep_bytes=keep_bytes)
    assert caught.value.problem.code == "checkpoint.bad_limit"


def test_records_with_tensors_under_one_name_are_one_component(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep_last=1, keep_bytes=None, run_id="r", components=["replay"])
    replay = {"tokens": torch.arange(5)}
    info = store.save(
        1, tensors={"replay": replay}, records={"replay": {"n": 5}}, model_writer=lambda _: None, metadata={}
    )
    checkpoint = store.open(1)
    assert info.components == ("replay",)
    assert torch.equal(checkpoint.tensors("replay")["tokens"], torch.arange(5))
    assert checkpoint.records("replay") == {"n": 5}
    assert json.loads((info.path / "state" / "replay.json").read_text()) == {"n": 5}


def test_a_folder_that_cannot_be_made_is_an_error_of_storage_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot keep checkpoints in .*run/checkpoints") as caught:
        CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=1, keep_bytes=None, run_id="r")
    assert caught.value.problem.code == "checkpoint.folder_refused"


def test_a_model_is_expected_to_be_as_large_as_the_one_before(small_run, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    real = stores.write_checkpoint
    monkeypatch.setattr(
        stores, "write_checkpoint", lambda request, plan: requests.append(request) or real(request, plan)
    )
    store = small_run.store()
    info = small_run.save(store, 1)
    small_run.save(store, 2)
    sizes = {path.name: path.stat().st_size for path in (info.path / "model").rglob("*") if path.is_file()}
    assert [request.model_bytes for request in requests] == [0, sum(sizes.values())]
    assert [(request.sequence, request.parent_step, request.last_good) for request in requests] == [
        (1, None, None),
        (2, 1, 1),
    ]
    requests.clear()
    small_run.save_by_ranks(2, 3)
    others = sum(size for name, size in sizes.items() if not name.endswith(".safetensors"))
    assert [request.model_bytes for request in requests] == [others, others], "the ranks announce their weights"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes folders refuse what is written in them, in place of those that refused before."""
    real = write_rank

    def refuse(*folders: Path, error: int = errno.ENOSPC) -> None:
        def write(staging: Path, *arguments: Any) -> Any:
            if staging.parent in folders:
                raise OSError(error, os.strerror(error), str(staging))
            return real(staging, *arguments)

        monkeypatch.setattr(writer, "write_rank", write)

    return refuse


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_save_that_the_run_refuses_goes_to_the_second_folder(small_run, disk, tmp_path: Path, error: int) -> None:
    second = tmp_path / "other" / "run-1"
    store = small_run.store(fallback=second)
    small_run.save(store, 1)
    disk(small_run.directory, error=error)
    info = small_run.save(store, 2)
    assert info.path == second / "step_000002"
    assert info.refused is not None
    assert errno.errorcode[error] in info.refused.what
    assert small_run.names() == ["other_places.txt", "step_000001"], "nothing is left of the refused save"
    again = small_run.store()
    found = again.newest_verified()
    assert found.findings == ()
    assert found.checkpoint is not None
    assert small_run.state_of(found.checkpoint) == (2, 0)
    assert [each.step for each in again.list()] == [1, 2]
    assert again.open(2).path == info.path
    assert published(small_run.directory) == {1: small_run.directory / "step_000001", 2: info.path}


def test_limits_hold_over_both_folders_and_a_step_is_kept_once(small_run, disk, tmp_path: Path) -> None:
    second = tmp_path / "other" / "run-1"
    store = small_run.store(fallback=second, keep_last=2)
    small_run.save(store, 1)
    disk(small_run.directory)
    small_run.save(store, 2)
    small_run.save(store, 3)
    assert [each.path for each in store.list()] == [second / "step_000002", second / "step_000003"]
    disk()
    info = small_run.save(store, 3, salt=1)
    assert info.path == small_run.directory / "step_000003"
    assert sorted(path.name for path in second.iterdir()) == ["run.txt", "step_000002"]
    assert small_run.state_of(store.open(3)) == (3, 1)
    small_run.save(store, 4)
    assert [each.path.parent for each in store.list()] == [small_run.directory] * 2
    assert [path.name for path in second.iterdir()] == ["run.txt"]


def test_both_folders_that_refuse_are_named_and_nothing_is_lost(small_run, disk, tmp_path: Path) -> None:
    second = tmp_path / "other" / "run-1"
    store = small_run.store(fallback=second)
    small_run.save(store, 1)
    disk(small_run.directory, second)
    with pytest.raises(StorageError) as caught:
        small_run.save(store, 2)
    problem = caught.value.problem
    assert str(small_run.directory) in problem.what
    assert str(second) in problem.what
    assert "last good step 1 untouched" in problem.state
    assert small_run.state_of(store.newest_verified().checkpoint) == (1, 0)
    assert [path.name for path in second.iterdir()] == ["run.txt"]


def test_a_second_folder_that_is_not_there_is_told(small_run, disk, tmp_path: Path) -> None:
    second = tmp_path / "other" / "run-1"
    store = small_run.store(fallback=second)
    small_run.save(store, 1)
    disk(small_run.directory)
    small_run.save(store, 2)
    second.rename(tmp_path / "unmounted")
    found = small_run.store().newest_verified()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    [finding] = found.findings
    assert str(finding).startswith(f"{second}: is not there")
