"""Models as objects: written once, with their tokenizer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.library.given_model import model_place
from rft.library.run import Run
from rft_core.errors import OptionsError
from rft_models.loading.transformers_loading import plain_model, plain_tokenizer


@pytest.fixture(scope="module")
def loaded(small_model: Path) -> Any:
    return plain_model(small_model)


def test_names_paths_and_runs_are_places(tmp_path: Path) -> None:
    assert model_place("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_place(Path("a/b")) == "a/b"
    (tmp_path / "config.yaml").write_text("pretrain: m\n")
    assert model_place(Run(tmp_path)) == str(tmp_path)


def test_a_model_is_written_once_under_its_weights(loaded: Any, small_model: Path, own_cache: Path) -> None:
    loaded.name_or_path = str(small_model)
    place = Path(model_place(loaded))
    assert place.parent == own_cache / "models"
    again = plain_model(place)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert plain_tokenizer(place).get_vocab() == plain_tokenizer(small_model).get_vocab()
    assert model_place(loaded) == str(place)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    with torch.no_grad():
        next(iter(again.parameters())).add_(1.0)
    assert model_place(again, plain_tokenizer(small_model)) != str(place)


def test_what_is_no_model_is_refused(loaded: Any, small_model: Path) -> None:
    loaded.name_or_path = ""
    with pytest.raises(OptionsError, match="without a tokenizer"):
        model_place(loaded)
    with pytest.raises(OptionsError, match="model is of type int"):
        model_place(5)
    with pytest.raises(OptionsError, match="leave tokenizer out"):
        model_place("model", plain_tokenizer(small_model))
    with pytest.raises(OptionsError, match="merge_and_unload"):
        model_place(type("Adapted", (), {"peft_config": {}})())
