"""The vision tower of a model directory in numbers, from its config.json: for plans. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_models.families.vision import VISION_FAMILIES, is_vision
from rft_models.files.directories import existing_directory, read_config
from rft_models.files.transformers_config import hf_config, refusals


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a vision tower with the projector to the decoder's width."""

    parameters: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    patches_per_token: int
    """Patches that become one placeholder of the prompt."""


def tower_sizes(directory: str | Path) -> TowerSizes | None:
    """Return the sizes of a vision-language model's tower; None for a text model.

    Parameters are counted on a model without memory.

    Raises:
        DataError: no directory, or a damaged config.json.
    """
    path = existing_directory(directory)
    file = path / "config.json"
    kind = str(read_config(path).get("model_type", "")) if file.is_file() else ""
    if not is_vision(kind):
        return None
    config, parameters = _counted(path)
    vision = config.vision_config
    hidden = _first(vision, "embed_dim", "hidden_size")  # of Qwen2-VL hidden_size is the decoder's
    ffn = int(getattr(vision, "intermediate_size", 0) or 0) or int(hidden * float(getattr(vision, "mlp_ratio", 4)))
    return TowerSizes(
        parameters=parameters,
        layers=_first(vision, "depth", "num_hidden_layers"),
        hidden=hidden,
        ffn=ffn,
        heads=_first(vision, "num_heads", "num_attention_heads"),
        patches_per_token=VISION_FAMILIES[kind].layout(config).patches_per_token,
    )


def _counted(path: Path) -> tuple[Any, int]:
    """(configuration, parameters outside the decoder and its output matrix)."""
    import torch
    from transformers import AutoModelForImageTextToText

    config = hf_config(path)
    with refusals(path, RuntimeError), torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    own = {id(weight) for weight in model.get_decoder().parameters()}
    own |= {id(weight) for weight in model.get_output_embeddings().parameters()}
    return config, sum(weight.numel() for weight in model.parameters() if id(weight) not in own)


def _first(config: Any, *names: str) -> int:
    return next(int(getattr(config, name)) for name in names if getattr(config, name, None))
