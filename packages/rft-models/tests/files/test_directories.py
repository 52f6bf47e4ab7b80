"""What is said of a directory that is no model, before anything is read from it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.utils import logging as reports

from rft_core.errors import DataError
from rft_models.files.directories import (
    checked_model_directory,
    damaged_weights,
    existing_directory,
    missing_weights,
    no_load_report,
    no_progress_bars,
    read_config,
    read_json,
    weights_by_list,
)


def refused(call: Callable[..., object], *given: object) -> tuple[str, str, str]:
    with pytest.raises(DataError) as caught:
        call(*given)
    return caught.value.problem.code, caught.value.problem.where, caught.value.problem.do


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration and weights that nobody reads."""
    path = tmp_path / "models" / "llama"
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_text("")
    return path


def test_a_model_is_a_directory_with_a_configuration_and_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert existing_directory(str(model)) == model
    assert checked_model_directory(model) == (model, {"model_type": "llama"})
    monkeypatch.setenv("HOME", str(model.parent))
    assert existing_directory("~/llama") == model


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("lama", "use {root}/llama"),
        ("qqqq", "ls {root}"),
        ("lama/deeper/still", "use {root}/llama"),
        ("llama/config.json", "use {root}/llama"),
    ],
)
def test_a_path_that_is_no_directory_is_answered_with_the_nearest_one(name: str, do: str, model: Path) -> None:
    (model.parent / "lama.txt").write_text("a file is no model")
    path = model.parent / name
    assert refused(existing_directory, path) == ("models.no_directory", str(path), do.format(root=model.parent))


@pytest.mark.parametrize(
    ("count", "listed"), [(0, "no directories"), (8, "m0, m1, m2, m3, m4, m5, m6, m7"), (9, "...")]
)
def test_up_to_eight_directories_beside_it_are_listed(count: int, listed: str, tmp_path: Path) -> None:
    for number in range(count):
        (tmp_path / f"m{number}").mkdir()
    with pytest.raises(DataError) as caught:
        existing_directory(tmp_path / "absent")
    what = caught.value.problem.what
    assert what.endswith(listed)
    assert "m8" not in what


def test_adapters_alone_are_no_model(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    assert existing_directory(model) == model
    (model / "config.json").unlink()
    with pytest.raises(DataError, match="the/base") as caught:
        existing_directory(model)
    assert caught.value.problem.code == "models.adapters_alone"
    (model / "adapter_config.json").write_text("{}")
    assert refused(existing_directory, model)[0] == "models.adapters_alone"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"3"])
def test_a_file_that_holds_no_object_is_damaged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert refused(read_json, path) == ("models.damaged_json", str(path), "copy a.json of the model again")
    path.write_text('{"a": "ä"}', encoding="utf-8")
    assert read_json(path) == {"a": "ä"}


def test_a_directory_without_a_configuration_is_answered_with_one_below(model: Path) -> None:
    path = model.parent
    assert refused(read_config, path) == ("models.no_config", str(path), f"use {model}")
    (model / "config.json").unlink()
    assert refused(read_config, path)[2] == f"copy the model's config.json into {path}"
    (model / "config.json").write_text('{"a": 1}')
    assert read_config(model) == {"a": 1}


def test_only_safetensors_are_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    code, where, do = refused(checked_model_directory, model)
    assert (code, where, do) == ("models.no_weights", str(model), f"copy model.safetensors into {model}")
    for name in ("b.bin", "a.pt", "c.pth"):
        (model / name).write_text("")
    assert refused(checked_model_directory, model)[2] == "convert a.pt to model.safetensors"


def test_weights_that_are_listed_stand_for_files_while_they_are(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 100, "hidden_size": 10}')
    with weights_by_list({model: {"1.safetensors": 400, "2.safetensors": 100}}):
        assert checked_model_directory(model)[0] == model
        index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
        assert checked_model_directory(model)[0] == model
    with weights_by_list({model: {"1.safetensors": 499}}):
        assert refused(checked_model_directory, model)[2] == f"copy 2.safetensors into {model}"
        index.unlink()
        assert refused(checked_model_directory, model)[0] == "models.config_value", "499 bytes are too few"
    assert refused(checked_model_directory, model)[0] == "models.no_weights"


def test_every_file_that_the_index_names_is_needed(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}))
    with pytest.raises(DataError, match=r"^2 of 2 .* 1\.safetensors"):
        checked_model_directory(model)
    (model / "1.safetensors").write_text("")
    assert refused(checked_model_directory, model) == (
        *("models.missing_shard", str(index)),
        f"copy 2.safetensors into {model}",
    )
    (model / "2.safetensors").write_text("")
    (model / "model.safetensors").unlink()
    assert checked_model_directory(model)[0] == model
    index.write_text("{}")
    assert checked_model_directory(model)[0] == model


@pytest.mark.parametrize("name", ["weights.bin", "../model.safetensors", "/m.safetensors", "model.safetensors.pt", "3"])
def test_an_index_names_safetensors_beside_it_alone(model: Path, name: str) -> None:
    index = model / "model.safetensors.index.json"
    (model / "weights.bin").write_text("")
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": int(name) if name == "3" else name}}))
    code, where, do = refused(checked_model_directory, model)
    assert (code, where) == ("models.foreign_shard", str(index))
    assert name in do


def test_weights_that_do_not_load_are_those_of_a_file_or_of_a_directory(model: Path) -> None:
    file = model / "model.safetensors"
    told = [damaged_weights(path, ValueError("\nfirst\nsecond")).problem for path in (file, model)]
    assert {problem.what.rpartition(" ")[2] for problem in told} == {"first"}
    assert [problem.where for problem in told] == [str(file), str(model)]
    assert told[0].do == "copy model.safetensors of the model again"
    assert told[1].do.startswith("copy the *.safetensors and config.json")
    assert told[0].why != told[1].why
    assert damaged_weights(file, ValueError()).problem.what.endswith("ValueError")
    missing = missing_weights(model, "what is missing").problem
    assert (missing.code, missing.what) == ("models.missing_weights", "what is missing")


@pytest.mark.parametrize("were_on", [True, False])
def test_bars_are_off_while_weights_are_read_and_as_before_afterwards(
    were_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: were_on)
    before = reports.is_progress_bar_enabled()
    try:
        (reports.enable_progress_bar if were_on else reports.disable_progress_bar)()
        seen: list[bool] = []
        with contextlib.suppress(RuntimeError), no_progress_bars():
            seen.append(reports.is_progress_bar_enabled())
            raise RuntimeError
        assert seen == [False]
        assert reports.is_progress_bar_enabled() is were_on
        assert os.environ.get("DS_ACCELERATOR") == (None if were_on else "cpu")
    finally:
        (reports.enable_progress_bar if before else reports.disable_progress_bar)()
        os.environ.pop("DS_ACCELERATOR", None)


def test_the_report_of_a_load_is_off_for_as_long_as_it_is_asked() -> None:
    before = reports.get_verbosity()
    seen: list[int] = []
    with contextlib.suppress(RuntimeError), no_load_report():
        seen.append(reports.get_verbosity())
        raise RuntimeError
    assert seen == [logging.ERROR]
    assert reports.get_verbosity() == before != logging.ERROR


def test_an_empty_path_and_a_pipe_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.chdir(model)
    os.mkfifo(tmp_path / "pipe")
    for path, said in (("", "is empty"), (tmp_path / "pipe", "is a pipe")):
        with pytest.raises(DataError, match=said) as caught:
            existing_directory(path)
        assert caught.value.problem.code == "models.no_directory"


@pytest.mark.parametrize("damage", [b"no weights", b"", b"\xff" * 64, None])
def test_a_damaged_file_of_weights_does_not_speak_against_the_configuration(
    tmp_path: Path, damage: bytes | None
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "hidden_size": 64}')
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000, 64)}, weights)
    whole = weights.read_bytes()
    # None: cut behind its header, which still says how much there was
    weights.write_bytes(whole[: len(whole) // 8] if damage is None else damage)
    assert checked_model_directory(tmp_path)[1]["hidden_size"] == 64


def test_sizes_that_the_weights_cannot_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000000, "hidden_size": 64}')
    save_file({"w": torch.zeros(1000, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as caught:
        checked_model_directory(tmp_path)
    assert caught.value.problem.code == "models.config_value"
    assert "vocab_size = 1000000" in caught.value.problem.what
