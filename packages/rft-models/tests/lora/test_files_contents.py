"""What the files of adapters say, and what is refused before a value changes, with a double of the adapters."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rft_core.errors import DataError
from rft_models.lora import files
from rft_models.lora.adapters import Adapters


class Config:
    """peft's configuration, as far as it is read."""

    base_model_name_or_path = "base/model"

    def to_dict(self) -> dict[str, Any]:
        return {
            "r": 2,
            "target_modules": {"v", "q"},
            "inference_mode": False,
            "x": Path("a/b"),
            "base_model_name_or_path": "base/model",
        }


def adapters(waiting: dict[str, torch.Tensor] | None = None) -> Any:
    """Adapters with two tensors, named "x.<name>" in files."""
    made = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(2))}
    return SimpleNamespace(
        config=Config(),
        base_fingerprint="f1",
        waiting={} if waiting is None else waiting,
        parameters=made,
        base_parameters=lambda: iter([("w", torch.zeros(1, dtype=torch.float16)), ("v", torch.zeros(1))]),
        named_parameters=lambda: iter(made.items()),
        file_name=lambda name: f"x.{name}",
        tensors=lambda items: {f"x.{name}": tensor for name, tensor in items if name in made},
        merged=lambda items: ((name, tensor + 1) for name, tensor in items if name not in made),
    )


TENSORS = {"x.b": torch.ones(2), "x.a": torch.arange(6.0).view(3, 2).t().requires_grad_()}


def written(folder: Path) -> Path:
    files.save(cast("Adapters", adapters()), folder / "deep" / "adapter", TENSORS)
    return folder / "deep" / "adapter"


def test_a_directory_has_the_configuration_the_tensors_and_what_they_belong_to(tmp_path: Path) -> None:
    written(tmp_path)
    folder = written(tmp_path)  # over what is there
    config = '{\n  "base_model_name_or_path": "base/model",\n  "inference_mode": true,\n  "r": 2,\n'
    assert (folder / "adapter_config.json").read_text() == (
        config + '  "target_modules": [\n    "q",\n    "v"\n  ],\n  "x": "a/b"\n}\n'
    )
    assert (folder / "base.json").read_text() == (
        '{\n  "directory": "base/model",\n  "dtype": "float16",\n  "fingerprint": "f1"\n}\n'
    )
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in found.items())
    header = (folder / "adapter_model.safetensors").read_bytes()
    assert b'"format":"pt"' in header
    assert files.base_dtype(folder) is torch.float16


def test_a_model_directory_has_its_adapters_in_a_folder_and_merged_weights(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, 3), "w": torch.ones(2)}
    found = files.save_beside(cast("Adapters", adapters()), tmp_path, state)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [2.0, 2.0]}
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == {"x.a"}


def test_values_are_loaded_where_they_are_or_wait(tmp_path: Path) -> None:
    folder, own = written(tmp_path), adapters()
    files.load(own, folder)
    assert torch.equal(own.parameters["a"], TENSORS["x.a"])
    assert torch.equal(own.parameters["b"], TENSORS["x.b"])
    assert own.parameters["a"].requires_grad
    waiting = {"a": torch.zeros(2, 3)}
    own = adapters(waiting)
    files.load(own, folder)
    assert torch.equal(waiting["a"], TENSORS["x.a"])
    assert not own.parameters["a"].any()
    assert torch.equal(own.parameters["b"], TENSORS["x.b"])


def refused(own: Any, folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        files.load(own, folder)
    assert not any(parameter.any() for parameter in own.parameters.values()), "nothing was changed"
    assert caught.value.problem.where == str(folder)
    return caught.value


@pytest.mark.parametrize("change", ["absent", "more", "shape"])
def test_tensors_of_other_layers_are_refused(change: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in TENSORS.items()}
    if change == "absent":
        del tensors["x.b"]
    else:
        tensors |= {"x.c": torch.ones(1)} if change == "more" else {"x.a": torch.ones(2, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    problem = refused(adapters(), folder).problem
    assert problem.code == "adapters.other_layers"
    named = {"absent": "x.b", "more": "x.c", "shape": "x.a [2, 4] for [2, 3]"}[change]
    assert problem.what.startswith("1 tensors")
    assert problem.what.endswith(named)
    assert problem.do == "--lora_rank 2 --lora_type lora --target_modules q,v"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"r": 4, "use_dora": True, "use_rslora": True}, "--lora_rank 4 --lora_type dora --target_modules all-linear"),
        (
            {"r": 1, "use_rslora": True, "target_modules": "q|v"},
            "--lora_rank 1 --lora_type rslora --target_modules q|v",
        ),
        ({"r": 1, "target_modules": ["z", "b"]}, "--lora_rank 1 --lora_type lora --target_modules b,z"),
    ],
)
def test_the_remedy_has_the_flags_of_the_configuration(config: dict[str, Any], flags: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    save_file({"x.a": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert refused(adapters(), folder).problem.do == flags


def test_adapters_of_other_base_weights_are_refused_where_the_files_name_theirs(tmp_path: Path) -> None:
    folder, own = written(tmp_path), adapters()
    own.base_fingerprint = "f2"
    problem = refused(own, folder).problem
    assert problem.code == "adapters.other_base"
    assert "base/model" in problem.what
    (folder / "base.json").unlink()
    files.load(own, folder)
    assert torch.equal(own.parameters["b"], TENSORS["x.b"])


@pytest.mark.parametrize("content", [None, b"no tensors"])
def test_a_file_that_does_not_open_is_damaged(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(DataError) as caught:
        files.read_tensors(tmp_path)
    assert (caught.value.problem.code, caught.value.problem.where) == ("adapters.damaged", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
        ("float32", torch.float32),
        ("other", torch.float32),
        (None, torch.float32),
    ],
)
def test_the_type_of_the_base_is_that_of_training(name: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    assert files.base_dtype(tmp_path) is torch.float32
    (tmp_path / "base.json").write_text(json.dumps({} if name is None else {"dtype": name}))
    assert files.base_dtype(tmp_path) is dtype


def test_the_base_is_the_model_that_is_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for named in (str(base), "", None):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        with pytest.raises(DataError) as caught:
            files.base_directory(tmp_path)
        assert caught.value.problem.code == "adapters.no_base"
        assert (str(base) in caught.value.problem.do) == bool(named)
    (base / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert files.base_directory(tmp_path) == base
