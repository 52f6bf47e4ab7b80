"""Values of a config.json that no model could have, found before anything is made of them.

Only what every architecture agrees on is checked here: kinds and ranges of the common fields, also inside the parts of
a vision-language model. What an architecture makes of the rest is its own, and `transformers_config` says where that
fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError

MOST_TOKENS = 2**24
"""Above every vocabulary; a tokenizer takes memory for its highest id."""

_SIZES = {
    "vocab_size": MOST_TOKENS,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
}
"""The most of each; lists, of one size a layer, and null are left to the architecture."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_MATRICES = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("head_dim", "hidden_size"),
    ("num_attention_heads", "hidden_size"),
    ("num_key_value_heads", "hidden_size"),
)
"""Pairs of sizes with at least one matrix of their product in the weights."""
_PARTS = ("text_config", "vision_config")
_TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_TYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise for the first field of a config.json that cannot be used.

    Raises:
        DataError: naming the file, the field and the values that are allowed.
    """
    for field, value, allowed in _faults(config):
        raise wrong_value(file, field, value, allowed)


def check_sizes(file: Path, config: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse sizes that `num_bytes` of weights cannot have, for which gigabytes might be taken before that is noticed.

    Raises:
        DataError: naming the file and the larger of the two fields.
    """
    for part in (config, config.get("text_config")):
        values = cast(Mapping[str, Any], part) if isinstance(part, Mapping) else dict[str, Any]()
        for fields in _MATRICES:
            first, second = (values.get(field) for field in fields)
            # half a byte a number is the least that any format takes
            if isinstance(first, int) and isinstance(second, int) and first * second > 2 * num_bytes:
                field, value = (fields[0], first) if first >= second else (fields[1], second)
                most = 2 * num_bytes // max(min(first, second), 1)
                raise wrong_value(file, field, value, f"at most {most}, as the weights have {num_bytes} bytes")


def wrong_value(file: Path, field: str, value: object, allowed: str) -> DataError:
    """Return the error of a field that cannot be used."""
    shown = repr(value)
    return DataError(
        code="models.config_value",
        what=f"{field} = {shown if len(shown) <= 80 else shown[:80] + '...'}; allowed: {allowed}",
        where=f"{file}: {field}",
        why="sizes, names and token ids of a model are taken from its files as they stand",
        do=f"copy {file.name} of the model again",
    )


def check_token_id(file: Path, field: str, value: object) -> None:
    """Raise `DataError` for a token id, or a list of them, that no vocabulary has; null is allowed."""
    if not _is_token_id(value):
        raise wrong_value(file, field, value, f"a token id from 0 to {MOST_TOKENS - 1}, a list of them, or null")


def _faults(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, what is allowed) of fields that cannot be used."""
    rules: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_PARTS, _is_object, "an object"),
        (("rope_scaling", "rope_parameters", "quantization_config", "auto_map"), _is_object, "an object or null"),
        (("model_type",), lambda value: isinstance(value, str) or value is None, "a name"),
        (("architectures", "layer_types"), _is_names, "a list of names or null"),
        (("dtype", "torch_dtype"), _is_type, ", ".join(_TYPES)),
        (("tie_word_embeddings",), lambda value: isinstance(value, bool) or value is None, "true or false"),
        (_LENGTHS, _is_length, "a whole number from 0 (not stated), or null"),
        (("rope_theta", "rms_norm_eps", "layer_norm_eps"), _is_positive, "a number above 0"),
        (_TOKEN_IDS, _is_token_id, f"a token id from 0 to {MOST_TOKENS - 1}, a list of them, or null"),
        (("transformers_weights",), lambda value: value is None, "left out: weights are in model.safetensors"),
    ]
    for field, most in _SIZES.items():
        if field in config and not _is_size(config[field], most):
            yield f"{prefix}{field}", config[field], f"a whole number from 1 to {most}"
    for fields, is_right, allowed in rules:
        for field in fields:
            if field in config and not is_right(config[field]):
                yield f"{prefix}{field}", config[field], allowed
    yield from _pad_fault(config, prefix)
    for field in ("rope_scaling", "rope_parameters"):
        yield from _rope_faults(config.get(field), f"{prefix}{field}.")
    for part in _PARTS:
        inside = config.get(part)
        if isinstance(inside, dict):
            yield from _faults(cast(dict[str, Any], inside), f"{prefix}{part}.")


def _rope_faults(rope: object, prefix: str) -> Iterator[tuple[str, Any, str]]:
    values = cast(dict[str, Any], rope) if isinstance(rope, dict) else dict[str, Any]()
    for field in ("rope_theta", "factor"):
        if field in values and not _is_positive(values[field]):
            yield f"{prefix}{field}", values[field], "a number above 0"
    for field in ("type", "rope_type"):
        if not isinstance(values.get(field, ""), str):
            yield f"{prefix}{field}", values[field], "a name"


def _pad_fault(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, str]]:
    pad, vocab = config.get("pad_token_id"), config.get("vocab_size")
    # its row of the embedding is left out of training, so there has to be one
    if isinstance(pad, int) and isinstance(vocab, int) and pad >= vocab:
        yield f"{prefix}pad_token_id", pad, f"below vocab_size, which is {vocab}"


def _is_size(value: Any, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return value is None or isinstance(value, list)
    return 1 <= value <= most


def _is_length(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value)))


def _is_type(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _TYPES)


def _is_positive(value: Any) -> bool:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return math.isfinite(value) and value > 0


def _is_token_id(value: Any) -> bool:
    """Return true for an id, a list of ids or null; -1 stands for none in some files."""
    values = cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) and -1 <= one < MOST_TOKENS for one in values)
