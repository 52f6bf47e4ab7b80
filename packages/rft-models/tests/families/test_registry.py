"""The table of text architectures names the classes that transformers has for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rft_models.families.registry import TEXT_FAMILIES
from rft_models.loading.transformers_loading import refuse_other_kinds
from rft_models.own_decoder.architecture import CLASS_NAME, MODEL_TYPE


@pytest.mark.parametrize("model_type", sorted(TEXT_FAMILIES))
def test_the_class_of_a_family_is_that_of_transformers(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    expected = CLASS_NAME if model_type == MODEL_TYPE else CAUSAL[model_type]
    assert TEXT_FAMILIES[model_type].class_name == expected


def test_a_known_family_is_accepted_without_the_table_of_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)  # to import it would raise
    for architectures in (["Qwen2ForCausalLM"], [], None):
        refuse_other_kinds(tmp_path, {"model_type": "qwen2", "architectures": architectures})
    with pytest.raises(ImportError):
        refuse_other_kinds(tmp_path, {"model_type": "qwen2", "architectures": ["Qwen2Model"]})
