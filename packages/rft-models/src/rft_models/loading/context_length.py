"""Model type and context length of a model directory, read from config.json without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_models.families.vision import text_type
from rft_models.files.directories import checked_model_directory
from rft_models.loading.sequence_classifiers import has_no_token_head
from rft_models.loading.transformers_loading import refuse_other_kinds

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that planning a run needs."""

    model_type: str
    max_positions: int
    """Tokens that prompt and response may have together."""
    text_type: str = ""
    """`model_type` of the decoder inside a vision-language model; "" for others."""


def model_facts(directory: str | Path, *, without_head: bool = False) -> ModelFacts:
    """Read the facts of a directory that `load_policy` would accept; with `without_head` also of a reward model.

    Raises:
        DataError: directory, configuration or weights absent, damaged or of another kind.
    """
    path, config = checked_model_directory(directory)
    bare = without_head and has_no_token_head(config)
    refuse_other_kinds(path, {**config, "architectures": []} if bare else config, takes_images=True)
    _refuse_quantized(path, config)
    text = config.get("text_config") or config
    lengths = [int(text[key]) for key in _LENGTH_KEYS if text.get(key)]
    return ModelFacts(
        model_type=str(config["model_type"]),
        max_positions=min(lengths, default=2**31 - 1),
        text_type=text_type(config),
    )


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Raise for weights that were rounded when they were saved (GPTQ, AWQ, FP8, bitsandbytes)."""
    chosen = config.get("quantization_config")
    if not chosen:
        return
    raise DataError(
        code="models.quantized",
        what=f"the weights of {path} are quantized ({chosen.get('quant_method', 'quantization_config')})",
        where=f"{path / 'config.json'}: quantization_config",
        why="a policy is trained on weights as they were before they were rounded",
        do="give the directory of the model that was quantized; --load_in_4bit rounds it as it is loaded",
    )
