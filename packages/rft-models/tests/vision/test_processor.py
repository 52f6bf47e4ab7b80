"""Prompts with images: placeholders, the processor's own numbers, directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from rft_core.errors import DataError, RftError
from rft_models.attention.kernels import describe_attention
from rft_models.families.vision import VISION_FAMILIES
from rft_models.loading.context_length import model_facts
from rft_models.policy.freezing import FreezeRules, preview
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_models.vision.image_files import PixelRules
from rft_models.vision.processor import HfProcessor, load_processor, load_vision_processor

FAMILIES = sorted(VISION_FAMILIES)
Directory = Callable[[str], Path]


@contextmanager
def refused(code: str, words: str = "") -> Iterator[pytest.ExceptionInfo[RftError]]:
    """An error of this code, whose text has these words."""
    with pytest.raises(RftError, match=words) as caught:
        yield caught
    assert caught.value.problem.code == code


def image(seed: int, width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ids_and_inputs_are_those_of_the_models_processor(vision_directory: Directory, model_type: str) -> None:
    from transformers import AutoProcessor

    tokenizer = load_vision_processor(vision_directory(model_type))
    images = [image(0, 24, 16), image(1, 16, 32)]
    token_ids, media = tokenizer.encode_media("a <image>b <image>?", images)
    assert media is not None
    marker = tokenizer.family.marker
    processor = AutoProcessor.from_pretrained(str(vision_directory(model_type)), local_files_only=True)
    own = processor(text=[f"a {marker}b {marker}?"], images=images, return_tensors="pt")
    assert token_ids == own["input_ids"][0].tolist()
    pixels = [one.pixel_values for one in media.images]
    assert torch.equal(torch.stack(pixels) if model_type == "llava" else torch.cat(pixels), own["pixel_values"])
    if model_type != "llava":
        assert [list(one.grid or ()) for one in media.images] == own["image_grid_thw"].tolist()
    places = [at for at, token in enumerate(token_ids) if token == tokenizer.image_token_id]
    assert places == [at for first, number in media.spans for at in range(first, first + number)]
    assert media.collapsed(token_ids) == tokenizer.encode(f"a {marker}b {marker}?")
    assert media.end == places[-1] + 1
    assert media.num_tokens == len(places) == sum(tokenizer.num_image_tokens(*one.size) for one in images)


def test_the_digest_is_of_what_the_model_sees(vision_directory: Directory) -> None:
    tokenizer = load_vision_processor(vision_directory("qwen2_5_vl"))
    digests = []
    for one in (image(0, 16, 16), image(0, 16, 16), image(1, 16, 16)):
        media = tokenizer.encode_media("<image>", [one])[1]
        assert media is not None
        digests.append(media.digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava"])
def test_messages_take_parts_and_markers(vision_directory: Directory, model_type: str) -> None:
    tokenizer = load_vision_processor(vision_directory(model_type))
    parts = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    expected = tokenizer.encode(f"user: {tokenizer.family.marker}how many?\nassistant: ")
    for content in (parts, "<image>how many?", [{"type": "text", "text": "<image>how many?"}]):
        ids, media = tokenizer.encode_media([{"role": "user", "content": content}], [image(0, 16, 16)])
        assert media is not None
        assert media.collapsed(ids) == expected
    assert tokenizer.encode_media([{"role": "user", "content": "hi"}], [])[1] is None


def test_another_number_of_images_than_placeholders_is_refused(vision_directory: Directory) -> None:
    tokenizer = load_vision_processor(vision_directory("qwen2_5_vl"))
    for text, count in (("none", 1), ("<image>", 2), ("<image><image>", 1), ("<image>", 0)):
        with refused("images.other_number", r"line 4") as caught:
            tokenizer.encode_media(text, [image(0, 16, 16)] * count, where="line 4")
        assert f"{text.count('<image>')} placeholders for {count} images" in str(caught.value)
    with pytest.raises(DataError, match=r"image 2 of 2") as caught:
        tokenizer.encode_media("<image><image>", [image(0, 16, 16), b"no image"])
    assert caught.value.problem.code == "images.not_an_image"


def test_pixel_caps_bound_the_features(vision_directory: Directory) -> None:
    directory = vision_directory("qwen2_5_vl")
    whole = load_vision_processor(directory)
    small = load_vision_processor(directory, pixels=PixelRules(max_pixels=16 * 16))
    large = load_vision_processor(directory, pixels=PixelRules(min_pixels=48 * 48, max_pixels=64 * 64))
    counts = []
    for tokenizer in (small, whole, large):
        media = tokenizer.encode_media("<image>", [image(0, 32, 32)])[1]
        assert media is not None
        assert media.num_tokens == tokenizer.num_image_tokens(32, 32)
        counts.append(media.num_tokens)
    assert counts == [4, 16, 36]
    with refused("images.fixed_size"):
        load_vision_processor(vision_directory("llava"), pixels=PixelRules(max_pixels=100))
    with refused("images.refused_by_processor"):
        whole.encode_media("<image>", [image(0, 2010, 8)])


def test_policies_save_what_the_processor_needs(vision_directory: Directory, tmp_path: Path) -> None:
    policy = load_policy(vision_directory("qwen2_5_vl"))
    policy.save_pretrained(tmp_path / "all")
    policy.save_description(tmp_path / "described")
    for saved in (tmp_path / "all", tmp_path / "described"):
        tokenizer = load_vision_processor(saved) if saved.name == "described" else load_policy(saved).tokenizer
        assert isinstance(tokenizer, HfProcessor)
        assert tokenizer.encode_media("<image>?", [image(0, 16, 16)]) == policy.tokenizer.encode_media(  # type: ignore[union-attr]
            "<image>?", [image(0, 16, 16)]
        )
    assert tokenizer.eos_ids == policy.tokenizer.eos_ids  # type: ignore[union-attr]


def test_a_run_on_text_alone_keeps_the_processor(vision_directory: Directory, tmp_path: Path) -> None:
    policy = load_policy(vision_directory("qwen3_vl"), tokenizer=load_tokenizer(vision_directory("qwen3_vl")))
    policy.save_pretrained(tmp_path / "saved")
    seen = load_vision_processor(tmp_path / "saved").encode_media("<image>?", [image(0, 16, 16)])
    assert seen == load_vision_processor(vision_directory("qwen3_vl")).encode_media("<image>?", [image(0, 16, 16)])


def test_text_directories_have_text_tokenizers(vision_directory: Directory, character_directory: Path) -> None:
    assert isinstance(load_processor(vision_directory("llava")), HfProcessor)
    assert not isinstance(load_processor(character_directory), HfProcessor)
    with refused("vision.other_model"):
        load_vision_processor(character_directory)


def test_incomplete_directories_are_named(vision_directory: Directory, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(vision_directory("qwen2_vl"), broken)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (broken / name).unlink(missing_ok=True)
    with refused("vision.no_processor"):
        load_policy(broken)
    config = json.loads((broken / "config.json").read_text())
    shutil.copytree(vision_directory("qwen2_vl"), broken, dirs_exist_ok=True)
    (broken / "config.json").write_text(json.dumps({**config, "image_token_id": 3}))
    with refused("vision.other_placeholder"):
        load_vision_processor(broken)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_visual_freezes_the_tower(vision_directory: Directory, model_type: str) -> None:
    rules = FreezeRules(prefixes=("visual",))
    policy = load_policy(vision_directory(model_type), freeze=rules)
    trained = dict(policy.trainable_parameters())
    frozen = {name for name, _ in policy.named_parameters()} - trained.keys()
    part = "model.vision_tower." if model_type == "llava" else "model.visual."
    assert frozen
    assert all(name.startswith(part) for name in frozen)
    assert not any(name.startswith(part) for name in trained)
    assert preview(vision_directory(model_type), rules).tensors.keys() == frozen


def test_the_plan_knows_what_packs(vision_directory: Directory) -> None:
    for model_type in FAMILIES:
        facts = model_facts(vision_directory(model_type))
        told = describe_attention(facts.model_type, "cpu", torch.float32, flash_attn=False, text_type=facts.text_type)
        assert "blocks of similar length, exact" in told
