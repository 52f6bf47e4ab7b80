"""Which files a processor of images is read from, with doubles of what reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import RftError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision import processor as module
from rft_models.vision.image_files import PixelRules, missing_extra
from rft_models.vision.processor import HfProcessor, load_processor, load_vision_processor


class Words:
    """A tokenizer whose placeholder is token 5."""

    eos_token_id, pad_token_id, chat_template = 9, None, None

    def __len__(self) -> int:
        return 10

    def convert_tokens_to_ids(self, word: str) -> int:
        return 5 if word == "<|image_pad|>" else 0


def of_transformers(**changes: Any) -> Any:
    size = {"shortest_edge": 4, "longest_edge": 400}
    parts = {
        "image_token": "<|image_pad|>",
        "image_processor": SimpleNamespace(size=size, patch_size=1, merge_size=1),
    } | changes
    return SimpleNamespace(**{name: part for name, part in parts.items() if part is not None})


class Loader:
    """transformers, which gives a processor or fails."""

    def __init__(self, given: Any) -> None:
        self.given, self.asked = given, list[tuple[str, dict[str, Any]]]()

    def from_pretrained(self, path: str, **options: Any) -> Any:
        self.asked.append((path, options))
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that loads a directory with this config.json through a processor of transformers."""
    words = Words()

    def call(config: dict[str, Any] | None, given: Any = None, **options: Any) -> tuple[Any, Loader]:
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        loader = Loader(of_transformers() if given is None else given)
        text = HfTokenizer(words, eos_ids=(3,), where="text")
        monkeypatch.setattr(module, "load_tokenizer", lambda directory: text)
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoProcessor=loader))  # type: ignore[arg-type]
        return options.pop("load", load_vision_processor)(str(tmp_path), **options), loader

    return call


def test_a_processor_is_read_from_local_files_without_code_and_takes_the_tokenizer(read: Any, tmp_path: Path) -> None:
    for config in (
        {"model_type": "qwen2_vl", "image_token_id": 5},
        {"model_type": "qwen2_vl"},
        {"model_type": "qwen2_vl", "image_token_index": 5},
        {"model_type": "qwen2_vl", "image_token_id": 5, "image_token_index": 7},
    ):
        found, loader = read(config, pixels=PixelRules(max_pixels=100))
        assert isinstance(found, HfProcessor)
        assert loader.asked == [(str(tmp_path), {"local_files_only": True, "trust_remote_code": False})]
        assert found.processor.tokenizer is found.hf_tokenizer
        assert (found.image_token_id, found.family.name, found.pixels.max_pixels) == (5, "Qwen2-VL", 100)
        assert (found.eos_ids, found.where) == ((9, 3), "text")


def test_a_directory_of_text_has_its_tokenizer_alone(read: Any) -> None:
    for config in (None, {"model_type": "qwen2"}, {}):
        found, loader = read(config, load=load_processor)
        assert type(found) is HfTokenizer
        assert not loader.asked
    found, _ = read({"model_type": "qwen2_vl"}, load=load_processor, pixels=PixelRules(min_pixels=9))
    assert isinstance(found, HfProcessor)
    assert found.pixels.min_pixels == 9


@pytest.mark.parametrize(
    ("config", "given", "code"),
    [
        ({"model_type": "qwen2"}, None, "vision.other_model"),
        ({}, None, "vision.other_model"),
        ({"model_type": "other", "vision_config": {}}, None, "vision.unknown_family"),
        ({"model_type": "qwen2_vl", "image_token_id": 6}, None, "vision.other_placeholder"),
        ({"model_type": "qwen2_vl", "image_token_index": 6}, None, "vision.other_placeholder"),
        ({"model_type": "qwen2_vl"}, of_transformers(image_token=None), "vision.no_processor"),
        ({"model_type": "qwen2_vl"}, of_transformers(image_processor=None), "vision.no_processor"),
        ({"model_type": "qwen2_vl"}, OSError("gone"), "vision.no_processor"),
        ({"model_type": "qwen2_vl"}, ValueError(), "vision.no_processor"),
        ({"model_type": "qwen2_vl"}, ImportError("torchvision"), "vision.not_installed"),
    ],
)
def test_what_is_no_such_directory_is_refused(config: dict[str, Any], given: Any, code: str, read: Any) -> None:
    with pytest.raises(RftError) as caught:
        read(config, given)
    assert caught.value.problem.code == code


def test_packages_are_looked_for_before_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise missing_extra("pillow")

    monkeypatch.setattr(module, "require_image_packages", missing)
    with pytest.raises(RftError) as caught:
        load_vision_processor(tmp_path)
    assert caught.value.problem.code == "vision.not_installed"
