"""Prompts with images through a processor of transformers, with a double of one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from rft_core.errors import DataError
from rft_models.families.vision import VISION_FAMILIES
from rft_models.reward_model.shared_images import SharedImages, shared_images_of
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.image_files import PixelRules
from rft_models.vision.processor import HfProcessor
from rft_models.vision.token_counts import PlannedImages

PLACE, FIRST = 1, 2
WORDS = {"<|image_pad|>": PLACE, "<s>": FIRST, "<image>": 3}


class Words:
    """A token a letter, or for one of `WORDS`; "<s>" is put in front as a special token."""

    eos_token_id, pad_token_id, chat_template = 9, None, None
    bos_token: str | None = "<s>"

    def __init__(self) -> None:
        self.rendered: list[Any] = []
        self.saved: list[str] = []

    def __len__(self) -> int:
        return 300

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [FIRST] if add_special_tokens else []
        while text:
            word = next((word for word in WORDS if text.startswith(word)), text[0])
            ids.append(WORDS[word] if word in WORDS else ord(word))
            text = text[len(word) :]
        return ids

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        self.rendered.append((messages, self.chat_template, given["add_generation_prompt"]))
        parts = [message["content"] for message in messages]
        flat = [part for content in parts for part in ([content] if isinstance(content, str) else content)]
        return "".join(
            part if isinstance(part, str) else part.get("text", "<|vision_start|><|image_pad|><|vision_end|>")
            for part in flat
        )

    def save_pretrained(self, path: str) -> None:
        self.saved.append(path)


class ImageProcessor:
    """A feature for every 4 x 4 pixels; refuses images of one pixel."""

    size: dict[str, int] = {"shortest_edge": 16, "longest_edge": 4096}  # noqa: RUF012
    patch_size, merge_size = 2, 2

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.grids = True

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        self.calls.append(options)
        [image] = images
        if image.width == 1:
            raise ValueError("too small")
        rows, columns = image.height // 2, image.width // 2
        pixels = torch.full((rows * columns, 3), float(image.getpixel((0, 0))[0]))
        if not self.grids:
            return {"pixel_values": pixels[None]}
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}

    def get_number_of_image_patches(self, height: int, width: int, options: dict[str, int]) -> int:
        assert options["min_pixels"] <= options["max_pixels"]
        if width > 100 * height:
            raise ValueError("too long")
        return min(max(height * width, options["min_pixels"]), options["max_pixels"]) // 4


class Processor:
    """Words and images."""

    image_token = "<|image_pad|>"
    chat_template = "its own"

    def __init__(self) -> None:
        self.image_processor = ImageProcessor()
        self.asked: list[Any] = []
        self.saved: list[str] = []

    def replace_image_token(self, prepared: Any, image_idx: int) -> str:
        assert image_idx == 0
        return self.image_token * (prepared["pixel_values"].reshape(-1, 3).shape[0] // 4)

    def _get_num_multimodal_tokens(self, image_sizes: Any, **options: int) -> dict[str, list[int]]:
        self.asked.append((image_sizes, options))
        return {"num_image_tokens": [image_sizes[0][0] * image_sizes[0][1] // 16]}

    def save_pretrained(self, path: str) -> None:
        self.saved.append(path)


def made(pixels: PixelRules | None = None, family: str = "qwen2_vl") -> tuple[HfProcessor, Words, Processor]:
    words, processor = Words(), Processor()
    text = HfTokenizer(words, eos_ids=(8,), where="a directory")
    return HfProcessor(text, processor, VISION_FAMILIES[family], PLACE, pixels), words, processor


def image(width: int = 8, height: int = 4, shade: int = 5) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, 0, 0))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


VISION = VISION_FAMILIES["qwen2_vl"].marker


def around(number: int) -> list[int]:
    """The tokens of the model's own marker, with so many placeholders."""
    before, after = VISION.split("<|image_pad|>")
    return letters(before) + [PLACE] * number + letters(after)


def test_each_marker_becomes_as_many_placeholders_as_its_image_has_features() -> None:
    tokenizer, _, processor = made()
    ids, media = tokenizer.encode_media("a<image>b<image>", [image(8, 4), image(8, 8, 7)])
    assert ids == [FIRST, *letters("a"), *around(2), *letters("b"), *around(4)]
    assert media is not None
    start = 2 + len(VISION.split("<|image_pad|>")[0])
    assert media.spans == ((start, 2), (start + len(around(2)) + 1, 4))
    assert [(one.grid, one.num_tokens, float(one.pixel_values[0, 0])) for one in media.images] == [
        ((1, 2, 4), 2, 5.0),
        ((1, 4, 4), 4, 7.0),
    ]
    assert (media.image_token_id, media.processor_options, len(media.files)) == (PLACE, {}, 2)
    assert processor.image_processor.calls == [{"return_tensors": "pt"}] * 2
    assert (tokenizer.eos_ids, tokenizer.where) == ((9, 8), "a directory")


def test_images_without_a_grid_are_the_first_of_a_batch() -> None:
    tokenizer, _, processor = made()
    processor.image_processor.grids = False
    media = tokenizer.encode_media("<image>", [image()])[1]
    assert media is not None
    assert (media.images[0].grid, tuple(media.images[0].pixel_values.shape)) == (None, (8, 3))


def test_a_text_that_has_its_first_token_gets_no_second() -> None:
    tokenizer, words, _ = made()
    assert tokenizer.encode_media("<s>a", []) == ([FIRST, *letters("a")], None)
    assert tokenizer.encode_media("a<s>", []) == ([FIRST, *letters("a"), FIRST], None)
    words.bos_token = None
    assert tokenizer.encode_media("a", []) == ([FIRST, *letters("a")], None), "what the tokenizer puts around a text"


@pytest.mark.parametrize("number", [0, 2])
def test_as_many_images_as_markers_are_wanted_before_one_is_opened(number: int) -> None:
    tokenizer, _, processor = made()
    with pytest.raises(DataError) as caught:
        tokenizer.encode_media("<image>", [b"no image"] * number, where="line 4")
    assert (caught.value.problem.code, caught.value.problem.where) == ("images.other_number", "line 4")
    assert not processor.image_processor.calls


def test_an_image_is_named_by_its_place_among_several() -> None:
    tokenizer, _, _ = made()
    for source, code in ((b"no image", "images.not_an_image"), (image(1), "images.refused_by_processor")):
        with pytest.raises(DataError) as caught:
            tokenizer.encode_media("<image>", [source], where="line 4")
        assert (caught.value.problem.code, caught.value.problem.where) == (code, "line 4")
        with pytest.raises(DataError) as caught:
            tokenizer.encode_media("<image><image>", [image(), source], where="line 4")
        assert (caught.value.problem.code, caught.value.problem.where) == (code, "line 4, image 2 of 2")


def test_a_range_of_pixels_is_handed_to_the_image_processor() -> None:
    tokenizer, _, processor = made(PixelRules(max_pixels=64, min_pixels=32))
    media = tokenizer.encode_media("<image>", [image()])[1]
    size = {"size": {"shortest_edge": 32, "longest_edge": 64}}
    assert processor.image_processor.calls == [{"return_tensors": "pt"} | size]
    assert media is not None
    assert media.processor_options == size
    assert tokenizer.num_image_tokens(8, 4) == 2
    assert processor.asked == [([[4, 8]], {"min_pixels": 32, "max_pixels": 64})]
    with pytest.raises(DataError) as caught:
        made(PixelRules(max_pixels=20))[0].encode_media("<image>", [b"x"])
    assert caught.value.problem.code == "images.not_an_image"


def test_messages_are_rendered_in_parts_by_the_processors_template() -> None:
    tokenizer, words, processor = made()
    assert tokenizer.has_chat_template
    other = {"type": "video"}
    messages = [
        {"role": "system", "content": "plain"},
        {"role": "user", "content": "a<image>b<image>"},
        {"role": "user", "content": [{"type": "text", "text": "<image>c"}, {"type": "image"}, other]},
        {"role": "tool", "content": None},
    ]
    text = {"type": "text", "text": "a"}
    picture = {"type": "image"}
    with pytest.raises(DataError):  # the double flattens no None
        tokenizer.render_chat(messages, add_generation_prompt=False)
    [(rendered, template, prompt)] = words.rendered
    assert [message["content"] for message in rendered] == [
        "plain",
        [text, picture, {"type": "text", "text": "b"}, picture],
        [picture, {"type": "text", "text": "c"}, picture, other],
        None,
    ]
    assert [message["role"] for message in rendered] == ["system", "user", "user", "tool"]
    assert (template, prompt) == ("its own", False)
    assert words.chat_template is None, "as it was"
    ids, _ = tokenizer.encode_media([{"role": "user", "content": "<image>"}], [image()])
    assert ids.count(PLACE) == 2
    assert words.rendered[-1][2] is True
    tokenizer.encode_media([{"role": "user", "content": "x"}], [], add_generation_prompt=False)
    assert words.rendered[-1][2] is False
    processor.chat_template = ""
    assert not tokenizer.has_chat_template


def test_everything_is_saved_and_words_of_images_are_known() -> None:
    tokenizer, words, processor = made()
    tokenizer.save_pretrained("there")
    assert (words.saved, processor.saved) == (["there"], ["there"])
    assert tokenizer.media_words == ("<image>", VISION, "<|image_pad|>")


def test_images_of_neighbours_that_are_the_same_files_are_prepared_once() -> None:
    plain, _, processor = made()
    shared = SharedImages(plain)
    files = (png(), png(shade=9))
    calls = processor.image_processor.calls
    for number, (text, images) in enumerate(
        [("<image>a<image>", files), ("b<image><image>", files), ("<image><image>c", (png(), png(shade=9)))]
    ):
        found = shared.encode_shared(text, images)
        assert len(calls) == 2, number
        assert found == made()[0].encode_media(text, images)
        assert found[1] is not None
        assert found[1].files == made()[0].encode_media(text, images)[1].files  # type: ignore[union-attr]
    assert shared.encode_shared("d", ()) == ([FIRST, *letters("d")], None)
    shared.encode_shared("<image><image>", files)
    assert len(calls) == 4, "another text was between"
    shared.encode_shared("<image><image>", files[::-1])
    assert len(calls) == 6
    with pytest.raises(DataError):
        shared.encode_shared("<image>", files[::-1])
    assert shared.of_response("a<image><|image_pad|>") == "a(image)(image)"
    assert isinstance(shared_images_of(plain), SharedImages)
    assert shared_images_of(HfTokenizer(Words())) is None


def png(shade: int = 5) -> bytes:
    buffer = io.BytesIO()
    image(shade=shade).save(buffer, format="PNG")
    return buffer.getvalue()


def test_plans_count_features_by_sizes_alone() -> None:
    planned = PlannedImages(made()[0])
    assert (planned.scales, planned.least_pixels, planned.pixels_of_token) == (True, 16, 16)
    assert planned.image_tokens(8, 4) == 2
    assert planned.image_tokens(2, 2) == 1, "enlarged to 16 pixels"
    assert planned.image_tokens(200, 100) == 4096 // 16
    assert planned.image_tokens(20, 10, 64) == 4
    assert planned.image_tokens(2, 2, 8) == 0, "the cap is below the fewest pixels"
    assert planned.image_tokens(1000, 2) is None
    assert planned.text_tokens("ab<image>") == 3 + len(around(1))
    limited = PlannedImages(made(PixelRules(max_pixels=64, min_pixels=32))[0])
    assert (limited.least_pixels, limited.image_tokens(2, 2), limited.image_tokens(99, 99)) == (32, 2, 4)
    assert limited.image_tokens(99, 99, 1600) == 100


def test_plans_of_images_of_one_size_ask_the_processor_once_a_size() -> None:
    tokenizer, _, processor = made(family="llava")
    planned = PlannedImages(tokenizer)
    assert (planned.scales, planned.pixels_of_token) == (False, 0)
    for _ in range(2):
        assert planned.image_tokens(8, 4) == 2
        assert planned.image_tokens(8, 8) == 4
    assert processor.asked == [([[4, 8]], {}), ([[8, 8]], {})]
    assert planned.image_tokens(8, 4, 7) == 2
    assert len(processor.asked) == 3
