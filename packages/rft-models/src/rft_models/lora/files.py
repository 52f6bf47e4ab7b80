"""Adapters in files, as peft reads and writes them: adapter_config.json and adapter_model.safetensors.

A third file beside them, base.json, records which weights they belong to: their directory, and a fingerprint of their
values, so that adapters are never continued on other weights than those they were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_core.errors import DataError
from rft_models.files.directories import read_json

if TYPE_CHECKING:
    from rft_models.lora.adapters import Adapters

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
FOLDER = "adapter"
"""Where a model directory with merged weights holds its adapters: beside config.json they would be applied twice."""

_SHOWN = 3


def save(adapters: Adapters, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a directory that peft loads. `tensors` are those of `Adapters.tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(config_text(adapters), encoding="utf-8")
    base = {
        "directory": adapters.config.base_model_name_or_path,
        "fingerprint": adapters.base_fingerprint,
        "dtype": str(next(parameter for _, parameter in adapters.base_parameters()).dtype).removeprefix("torch."),
    }
    _write_json(directory / BASE, base)
    # safetensors refuses tensors that are not contiguous
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in sorted(tensors.items())}
    save_file(on_cpu, str(directory / WEIGHTS), metadata={"format": "pt"})


def config_text(adapters: Adapters) -> str:
    """Return the text of adapter_config.json, as peft reads it."""
    config: dict[str, Any] = adapters.config.to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n"


def save_beside(adapters: Adapters, directory: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write the adapters to `FOLDER` below a model directory; returns the state with them folded in, to write there."""
    save(adapters, directory / FOLDER, adapters.tensors(state.items()))
    return dict(adapters.merged(state.items()))


def load(adapters: Adapters, directory: Path) -> None:
    """Load the values in a directory into adapters of the same layers, rank and base weights.

    Raises:
        DataError: files absent or damaged, other layers or ranks, or the adapters of other weights.
    """
    tensors = read_tensors(directory)
    expected = {adapters.file_name(name): parameter.shape for name, parameter in adapters.named_parameters()}
    differing = sorted(expected.keys() ^ tensors.keys())
    differing += [
        f"{name} {list(tensors[name].shape)} for {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if differing:
        raise DataError(
            code="adapters.other_layers",
            what=f"{len(differing)} tensors do not match these adapters: {', '.join(differing[:_SHOWN])}",
            where=str(directory),
            why="rank, kind and target modules must be those that the adapters were made with",
            state="nothing was changed",
            do=_flags_of(read_json(directory / CONFIG)),
        )
    if (directory / BASE).is_file():
        _refuse_other_base(adapters, directory)
    # only now, after every comparison: a refusal has changed no value
    with torch.no_grad():
        for name, parameter in adapters.named_parameters():
            # adapters without memory yet have their values in `waiting`
            adapters.waiting.get(name, parameter).copy_(tensors[adapters.file_name(name)])


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read the adapters' tensors of a directory; `DataError` where the file is damaged or absent."""
    try:
        return load_file(str(directory / WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise DataError(
            code="adapters.damaged",
            what=f"{WEIGHTS} does not open: {error}",
            where=str(directory),
            why="the file is damaged or absent",
            do="use another checkpoint, or copy the file again",
        ) from error


def base_directory(directory: Path) -> Path:
    """Return the directory of the base model that the adapters' own files name.

    Raises:
        DataError: they name none, or nothing is there.
    """
    config = read_json(directory / CONFIG)
    named = str(config.get("base_model_name_or_path") or "")
    if named and (Path(named) / "config.json").is_file():
        return Path(named)
    raise DataError(
        code="adapters.no_base",
        what=f"the base model of the adapters, {named or 'which is not named'}, was not found",
        where=str(directory / CONFIG),
        why="adapters are added to the weights of one model and fit no other",
        do=f"put the model back at {named}" if named else "name it as base_model_name_or_path in this file",
    )


def base_dtype(directory: Path) -> torch.dtype:
    """Return the type of the base weights during training; float32 where no file records it."""
    name = str(read_json(directory / BASE).get("dtype", "float32")) if (directory / BASE).is_file() else "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}.get(name, torch.float32)


def _refuse_other_base(adapters: Adapters, directory: Path) -> None:
    base = read_json(directory / BASE)
    if base.get("fingerprint") == adapters.base_fingerprint:
        return
    raise DataError(
        code="adapters.other_base",
        what=f"the base weights differ from those in {base.get('directory')} when the adapters were trained",
        where=str(directory),
        why="adapters are differences from the weights that they were trained on",
        state="nothing was changed",
        do=f"put the model back as it was at {base.get('directory')}, and start with the same --bf16",
    )


def _flags_of(config: Mapping[str, Any]) -> str:
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    targets = config.get("target_modules") or "all-linear"
    ends = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return f"--lora_rank {config.get('r')} --lora_type {kind} --target_modules {ends}"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
