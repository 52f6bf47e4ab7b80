"""Directories whose files hold no head for tokens, by the names of their classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_models.loading.sequence_classifiers import classifiers, decoder_class, edit_config, has_no_token_head


def test_classes_are_those_of_transformers() -> None:
    assert classifiers()["llama"] == "LlamaForSequenceClassification"
    assert decoder_class("llama") == "LlamaModel"
    assert decoder_class("funnel") == "FunnelModel", "the first of two"
    assert decoder_class("nothing") is None


@pytest.mark.parametrize(
    ("config", "without_head"),
    [
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ({"model_type": "llama", "architectures": None}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "nothing", "architectures": ["LlamaModel"]}, False),
        ({"architectures": ["LlamaModel"]}, False),
    ],
)
def test_a_without_head_or_under_a_classifier_has_no_head_for_tokens(
    config: dict[str, object], without_head: bool
) -> None:
    assert has_no_token_head(config) is without_head


def test_entries_are_changed_and_the_others_kept_in_order(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"b": 1, "a": "ä"}', encoding="utf-8")
    edit_config(file, {"c": [2], "b": 3})
    expected = json.dumps({"a": "ä", "b": 3, "c": [2]}, indent=2) + "\n"
    assert file.read_text(encoding="utf-8") == expected
