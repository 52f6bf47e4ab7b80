"""Token ids of prompts with images are those of transformers' own processor, for text and for messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rft_models.families.vision import VISION_FAMILIES
from rft_models.tiny_models.text import build_bpe_tokenizer, build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.processor import HfProcessor, load_vision_processor

FAMILIES = sorted(VISION_FAMILIES)
SIZES = VisionSizes(hidden=32, kv_heads=4, ffn=32, vision_hidden=32, vision_ffn=32, vision_layers=1, layers=1)
LETTERS = "abcdefghijklmnopqrstuvwxyz?:, \n"
TEXTS = ("<image>what is it?", "one <image>, two <image>, same?", "no image here")


def image(seed: int, width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


IMAGES = (image(0, 24, 16), image(1, 16, 32))


def with_beginning(tokenizer: Any) -> Any:
    """The tokenizer with a token that it puts before every text, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    place = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[place])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "characters": lambda: build_character_tokenizer(LETTERS),
    "bytes": lambda: build_bpe_tokenizer(["what is it? one two same no image here"] * 4, 300),
    "characters behind <s>": lambda: with_beginning(build_character_tokenizer(LETTERS)),
}


def loaded(path: Path, model_type: str, kind: str) -> tuple[HfProcessor, Any]:
    """Our tokenizer, and the processor that transformers makes of the same directory."""
    from transformers import AutoProcessor

    build_vision_model(path, TOKENIZERS[kind](), model_type=model_type, sizes=SIZES)
    tokenizer = load_vision_processor(path)
    processor: Any = AutoProcessor.from_pretrained(str(path), local_files_only=True)
    if kind == "characters behind <s>":  # AutoTokenizer makes a tokenizer of the family of it, without these rules
        processor.tokenizer = tokenizer.hf_tokenizer
    return tokenizer, processor


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_plain_text_has_the_processors_ids(model_type: str, kind: str, tmp_path: Path) -> None:
    tokenizer, processor = loaded(tmp_path, model_type, kind)
    for text in TEXTS:
        images = list(IMAGES[: text.count("<image>")])
        own = processor(text=[text.replace("<image>", tokenizer.family.marker)], images=images or None)
        found, media = tokenizer.encode_media(text, images)
        assert found == list(own["input_ids"][0])
        assert (found[0] == tokenizer.hf_tokenizer.bos_token_id) == (kind == "characters behind <s>")
        if media is not None:
            assert [found[at] for first, number in media.spans for at in range(first, first + number)] == [
                tokenizer.image_token_id
            ] * media.num_tokens


@pytest.mark.parametrize("template", ["as built", "with its own <s>"])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_messages_have_the_processors_ids(model_type: str, kind: str, template: str, tmp_path: Path) -> None:
    tokenizer, processor = loaded(tmp_path, model_type, kind)
    if template == "with its own <s>":
        beginning = "{{ bos_token }}" if tokenizer.hf_tokenizer.bos_token else ""
        processor.chat_template = tokenizer.processor.chat_template = beginning + processor.chat_template
    for text in TEXTS:
        images = list(IMAGES[: text.count("<image>")])
        parts: list[dict[str, Any]] = []
        left = list(images)
        for number, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image", "image": left.pop(0)}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        asked = [{"role": "user", "content": parts}]
        own = processor.apply_chat_template(asked, tokenize=True, return_dict=True, add_generation_prompt=True)
        found, _ = tokenizer.encode_media([{"role": "user", "content": text}], images)
        expected = own["input_ids"]
        assert found == list(expected[0] if isinstance(expected[0], list) else expected)
        assert found.count(tokenizer.hf_tokenizer.bos_token_id) == (1 if kind == "characters behind <s>" else 0)


def test_a_text_that_begins_with_the_first_token_does_not_get_it_twice(tmp_path: Path) -> None:
    tokenizer, _ = loaded(tmp_path, "llava", "characters behind <s>")
    assert tokenizer.encode_media("<s><image>a", [IMAGES[0]])[0] == tokenizer.encode_media("<image>a", [IMAGES[0]])[0]
