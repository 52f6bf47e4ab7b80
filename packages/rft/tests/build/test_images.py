"""Images from settings: their column and processor, what is refused beside them, and their counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import images
from rft_core.errors import OptionsError
from rft_trainer.data.images import ImageColumn
from rft_trainer.settings.images import ControlledImageSettings, GenerateImageSettings, ImageSettings


@pytest.mark.parametrize(
    ("settings", "column", "seed"),
    [
        (ImageSettings(), None, None),
        (ControlledImageSettings(shuffle_images=True), None, None),
        (ImageSettings(images_key="k"), ImageColumn("k", -1, False), None),
        (
            ControlledImageSettings(images_key="k", limit_mm_image_per_prompt=2, mixed_mm_data=True),
            ImageColumn("k", 2, True),
            None,
        ),
        (ControlledImageSettings(images_key="k", shuffle_images=True), ImageColumn("k", -1, False), 5),
    ],
)
def test_images_are_read_from_their_column(settings: ImageSettings, column: Any, seed: int | None) -> None:
    reading = images.row_images(settings, 5)
    assert (reading.column, reading.shuffle_seed) == (column, seed)


def test_images_are_exchanged_in_the_control_experiment_alone(calls: Any) -> None:
    calls.put(images, shuffle_images="others")
    rows: Any = ["a", "b"]
    assert images.ImageReading().arranged(rows) is rows
    assert images.ImageReading(None, 0).arranged(rows) == "others"
    assert calls.taken() == ["shuffle_images(['a', 'b'], 0)"]


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        (ImageSettings(), None),
        (GenerateImageSettings(), None),
        (ImageSettings(images_key="k"), (None, None)),
        (ImageSettings(images_key="k", max_pixels=9, min_pixels=4), (9, 4)),
        (GenerateImageSettings(image="a.png", max_pixels=9), (9, None)),
    ],
)
def test_a_processor_is_loaded_where_there_are_images(calls: Any, settings: ImageSettings, pixels: Any) -> None:
    calls.put(images, "tokenizer_of load_model_code load_vision_processor PixelRules")
    model = calls.double("model")
    found = images.tokenizer_with_images(model, settings)
    if pixels is None:
        assert found == "tokenizer_of()"
        assert calls.taken() == ["tokenizer_of(model)"]
        return
    assert found == "load_vision_processor()"
    assert calls.taken() == [
        "load_model_code(model.model_code)",
        f"PixelRules(max_pixels={pixels[0]}, min_pixels={pixels[1]})",
        "load_vision_processor(model.pretrain, pixels=PixelRules())",
    ]


class Processor:
    """Stands for a processor of images."""

    def __repr__(self) -> str:
        return "processor"


def refuse(calls: Any, *, parts: int = 1, loss: float = 0.0, critic: str = "", key: str = "image") -> None:
    calls.replace(images, HfProcessor=Processor)
    chosen = SimpleNamespace(
        group_sizes=lambda given: SimpleNamespace(matrix=parts if given == "strategy" else 0),
        matrix_setting="ds_tensor_parallel_size",
    )
    calls.put(images, "refuse_other_inputs", choose_strategy=chosen)
    given: Any = calls.double("strategy"), SimpleNamespace(aux_loss_coef=loss), Processor()
    images.refuse_beside_images(ImageSettings(images_key=key), *given, critic=critic)


@pytest.mark.parametrize(
    ("given", "code", "do"),
    [
        ({"parts": 2}, "images.parts", "--ds_tensor_parallel_size 1 --fsdp"),
        ({"loss": 0.1}, "images.router_loss", "--aux_loss_coef 0"),
    ],
)
def test_a_router_loss_and_matrices_in_parts_are_refused_beside_images(
    calls: Any, given: dict[str, Any], code: str, do: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        refuse(calls, **given)
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)
    refuse(calls, key="", **given)


def test_a_critic_of_its_own_must_take_the_same_images(calls: Any) -> None:
    refuse(calls, critic="critic_dir")
    assert calls.taken() == [
        "refuse_other_inputs(processor, 'critic_dir', flag='--critic_pretrain')",
        "choose_strategy(strategy)",
    ]
    refuse(calls)
    assert calls.taken() == ["choose_strategy(strategy)"]
    refuse(calls, key="", critic="critic_dir")
    assert calls.taken() == []


def row(length: int, num_images: int = 0, num_tokens: int = 0) -> Any:
    media = SimpleNamespace(num_images=num_images, num_tokens=num_tokens) if num_images else None
    return SimpleNamespace(media=media, token_ids=(0,) * length)


def test_images_are_counted_over_the_rows_that_have_some() -> None:
    assert images.image_counts([row(5)]) is None
    counts: Any = images.image_counts([row(99), row(7, 2, 5), row(9, 1, 3), row(8, 4, 4)])
    assert (counts.num_images, counts.num_rows, counts.longest_row) == (7, 3, 9)
    assert counts.tokens_an_image == (1.0, 3.0)


def test_images_beside_a_prompt_are_read_by_name(calls: Any) -> None:
    read: list[Any] = []

    def images_of(row: Any, column: Any) -> Any:
        read.append((row, column))
        return ("x", "y")

    calls.replace(images, images_of=images_of)
    calls.put(images, "check_images")
    calls.replace(images, Row=lambda values, source, number: (values, source, number))
    settings = GenerateImageSettings(image="a.png, b.png,", limit_mm_image_per_prompt=3)
    assert images.given_images(settings, "what?") == ("x", "y")
    column = ImageColumn("image", 3, mixed=True)
    asked = ({"image": ["a.png", "b.png"], "prompt": "what?"}, "--image", 1)
    assert read == [(asked, column)]
    assert calls.taken() == [f"check_images({asked!r}, 'prompt', {column!r}, ['what?'], 2)"]
