"""Record what the head of a reward model computes in the config.json of its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_models.loading.sequence_classifiers import classifiers, decoder_class, edit_config
from rft_models.reward_model.spec import RECORD, RewardSpec


def write_spec(spec: RewardSpec, model_type: str, file: Path) -> None:
    """Write the spec, and the classes that transformers reads the directory with, into a config.json.

    Args:
        spec: what the head computes.
        model_type: of the decoder.
        file: the config.json, which is there.
    """
    names = {str(number): name for number, name in enumerate(spec.heads)}
    changes: dict[str, Any] = {RECORD: spec.as_record()}
    if spec.is_classifier:
        changes |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    named = classifiers().get(model_type) if spec.is_classifier else decoder_class(model_type)
    edit_config(file, changes | ({"architectures": [named]} if named else {}))
