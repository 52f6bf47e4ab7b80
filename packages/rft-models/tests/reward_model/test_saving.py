"""The config.json of a saved reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_models.reward_model.saving import write_spec
from rft_models.reward_model.spec import RewardSpec

TWO = RewardSpec(heads=("b", "a"), weights=(1.0, 2.0))
LABELS: dict[str, Any] = {"id2label": {"0": "b", "1": "a"}, "label2id": {"b": 0, "a": 1}}


@pytest.mark.parametrize(
    ("spec", "model_type", "entries"),
    [
        (TWO, "qwen2", LABELS | {"architectures": ["Qwen2ForSequenceClassification"]}),
        (TWO, "no such type", LABELS | {"architectures": ["before"]}),
        (RewardSpec(layer=2), "qwen2", {"architectures": ["Qwen2Model"]}),
        (RewardSpec(layer=2), "no such type", {"architectures": ["before"]}),
    ],
)
def test_a_classifier_has_labels_and_every_model_its_class_where_transformers_has_one(
    spec: RewardSpec, model_type: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kept": 1, "architectures": ["before"]}))
    write_spec(spec, model_type, file)
    record = json.loads(json.dumps(spec.as_record()))
    assert json.loads(file.read_text()) == {"kept": 1, "reward_head": record} | entries
