"""What a person says of pixels acts, or is refused with both numbers: nothing is cut in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from rft_core.errors import OptionsError
from rft_models.vision.image_files import PixelRules
from rft_models.vision.processor import HfProcessor, load_vision_processor

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
Directory = Callable[[str], Path]

# The models of the tests: features of 8 x 8 pixels, images of 64 to 32 x 32 = 1,024 pixels.


def features(tokenizer: HfProcessor, width: int, height: int) -> int:
    media = tokenizer.encode_media("<image>", [Image.new("RGB", (width, height))])[1]
    assert media is not None
    assert media.num_tokens == tokenizer.num_image_tokens(width, height)
    return media.num_tokens


@pytest.mark.parametrize("model_type", QWEN)
@pytest.mark.parametrize(
    ("rules", "code", "told", "remedy"),
    [
        (
            PixelRules(min_pixels=2048),
            "images.beyond_processor",
            "min_pixels = 2,048, but the model's processor scales down to 1,024 pixels at most",
            "--min_pixels 2048 --max_pixels 2048 (or --min_pixels 1024)",
        ),
        (
            PixelRules(max_pixels=63),
            "images.below_one_feature",
            "max_pixels = 63, but one feature of this model covers 8 x 8 = 64 pixels",
            "--max_pixels 64",
        ),
    ],
)
def test_a_bound_that_could_not_act_is_refused_with_both_numbers(
    vision_directory: Directory, model_type: str, rules: PixelRules, code: str, told: str, remedy: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        load_vision_processor(vision_directory(model_type), pixels=rules)
    problem = caught.value.problem
    assert (problem.code, problem.what, problem.do) == (code, told, remedy)


def test_a_maximum_below_the_processors_minimum_is_refused_with_both_numbers(
    vision_directory: Directory, tmp_path: Path
) -> None:
    tokenizer = load_vision_processor(vision_directory("qwen2_5_vl"))
    tokenizer.processor.image_processor.size = {"shortest_edge": 256, "longest_edge": 1024}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((vision_directory("qwen2_5_vl") / "config.json").read_bytes())
    with pytest.raises(OptionsError) as caught:
        load_vision_processor(tmp_path, pixels=PixelRules(max_pixels=128))
    problem = caught.value.problem
    assert problem.what == "max_pixels = 128, but the model's processor enlarges to 256 pixels at least"
    assert problem.do == "--max_pixels 128 --min_pixels 64 (or --max_pixels 256)"
    remedied = load_vision_processor(tmp_path, pixels=PixelRules(max_pixels=128, min_pixels=64))
    assert features(remedied, 32, 32) <= 2


@pytest.mark.parametrize("model_type", QWEN)
def test_bounds_within_the_processors_range_act(vision_directory: Directory, model_type: str) -> None:
    directory = vision_directory(model_type)
    assert features(load_vision_processor(directory), 16, 16) == 4
    assert features(load_vision_processor(directory, pixels=PixelRules(min_pixels=1024)), 16, 16) == 16
    assert features(load_vision_processor(directory, pixels=PixelRules(max_pixels=64)), 32, 32) == 1
    assert features(load_vision_processor(directory, pixels=PixelRules(min_pixels=2048, max_pixels=2304)), 16, 16) == 36


def test_an_image_above_the_bound_may_be_refused_instead(vision_directory: Directory) -> None:
    tokenizer = load_vision_processor(vision_directory("llava"), pixels=PixelRules(max_pixels=400, oversize="refuse"))
    assert tokenizer.encode_media("<image>", [Image.new("RGB", (20, 20))])[1] is not None
    with pytest.raises(Exception, match="420 pixels, max_pixels = 400"):
        tokenizer.encode_media("<image>", [Image.new("RGB", (21, 20))])
