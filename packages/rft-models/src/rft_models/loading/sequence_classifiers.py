"""Sequence classifiers of transformers by name, and directories without a head for tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = "score"
"""What transformers calls the layer of its sequence classifiers."""


def classifiers() -> dict[str, str]:
    """Map each model_type to the name of its sequence classifier class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return dict(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def decoder_class(model_type: str) -> str | None:
    """Name of the class of the decoder alone."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = MODEL_MAPPING_NAMES.get(model_type)
    return names if names is None or isinstance(names, str) else names[0]


def has_no_token_head(config: Mapping[str, Any]) -> bool:
    """Return true where the files contain a decoder alone or under a classifier, in transformers' own names."""
    model_type = config.get("model_type", "")
    known = {decoder_class(model_type), classifiers().get(model_type)}
    return bool(known.intersection(config.get("architectures") or []))


def edit_config(file: Path, changes: Mapping[str, Any]) -> None:
    """Set entries of a config.json."""
    config = json.loads(file.read_text(encoding="utf-8")) | dict(changes)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
