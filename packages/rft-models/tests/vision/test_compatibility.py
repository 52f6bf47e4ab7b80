"""Two models that must read prompts alike, with doubles of what reads their directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rft_core.errors import OptionsError
from rft_models.vision import compatibility
from rft_models.vision.compatibility import refuse_other_inputs
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.processor import HfProcessor

SAME: dict[str, Any] = {"tokens": [1, 7, 7], "id": 7, "number": 2, "scale": 1.0, "wide": False}


class Reader:
    """Prepares one image; notes the pixels that it was given."""

    def __init__(self, **changes: Any) -> None:
        self.facts, self.pixels = SAME | changes, object()
        self.seen: list[Any] = []

    def encode_media(self, prompt: str, images: list[Any]) -> tuple[list[int], Media]:
        assert prompt == "<image>"
        [image] = images
        self.seen.append((image.size, image.mode, image.tobytes()))
        facts = self.facts
        values = torch.ones(2, 3) * facts["scale"]
        values = values.view(3, 2) if facts["wide"] else values
        inputs = ImageInputs.of(values, None, facts["number"])
        return facts["tokens"], Media((inputs,), ((1, facts["number"]),), facts["id"])


def compared(folder: Path, monkeypatch: pytest.MonkeyPatch, model_type: str = "qwen2_vl", **changes: Any) -> list[Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    own, other = Reader(), Reader(**changes)

    def load(path: Path, *, pixels: Any) -> Any:
        assert path == folder
        assert pixels is own.pixels
        return other

    monkeypatch.setattr(compatibility, "load_vision_processor", load)
    refuse_other_inputs(cast("HfProcessor", own), str(folder), flag="--critic")
    assert own.seen == other.seen
    return own.seen


def test_models_that_prepare_noise_alike_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [(size, mode, pixels)] = compared(tmp_path, monkeypatch)
    assert (size, mode) == ((96, 64), "RGB")
    noise = torch.randint(0, 256, (64, 96, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert pixels == noise.numpy().tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [1, 7]},
        {"id": 8},
        {"number": 3},
        {"scale": 2.0},
        {"wide": True},
        {"model_type": "qwen2"},
        {"model_type": ""},
    ],
)
def test_any_difference_is_refused_under_the_name_of_the_flag(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionsError) as caught:
        compared(tmp_path, monkeypatch, **changes)
    assert caught.value.problem.code == "images.other_inputs"
    assert caught.value.problem.where.startswith("--critic,")
    assert str(tmp_path) in caught.value.problem.what
