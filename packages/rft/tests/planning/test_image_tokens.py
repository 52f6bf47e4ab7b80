"""Image tokens before a run: which rows are looked at, their tokens, and the cap with which all of them fit."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from rft.planning import image_tokens
from rft.planning.image_tokens import PlannedRow, image_plan, largest_cap
from rft_trainer.data.images import ImageColumn


class Squares:
    """A processor whose feature is a square of 10 pixels; an image of 13 pixels width is refused."""

    pixels_of_token, least_pixels, eos_ids = 10, 40, (1, 2)

    def image_tokens(self, width: int, height: int, most_pixels: int | None = None) -> int | None:
        pixels = width * height if most_pixels is None else min(width * height, most_pixels)
        return None if width == 13 else pixels // 10

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def text_tokens(self, text: str) -> int:
        return len(text)


def row(text_tokens: int, *sizes: Any, where: str = "a") -> PlannedRow:
    return PlannedRow(where, text_tokens, sizes)


def test_tokens_are_those_of_the_text_with_every_placeholder_replaced() -> None:
    images: Any = Squares()
    assert row(7).tokens(images) == 7
    assert row(7, (10, 5)).tokens(images) == 7 + 5 - 1
    assert row(7, (10, 5), (10, 10)).tokens(images) == 7 + 15 - 2
    assert row(7, (10, 5), (10, 10)).tokens(images, 20) == 7 + 4 - 2
    assert row(7, (10, 5), (10, 10)).image_tokens(images) == [5, 10]
    for bad in (None, (13, 5)):
        assert row(7, (10, 5), bad).tokens(images) is None
        assert row(7, (10, 5), bad).image_tokens(images) is None


@pytest.mark.parametrize(
    ("rows", "limit", "cap"),
    [
        ([row(5, (10, 10))], 14, 110),
        ([row(5, (10, 10))], 13, 90),
        ([row(5, (10, 10))], 5, 10),
        ([row(5, (10, 10))], 4, 0),
        ([row(5, (10, 10)), row(9, (10, 4), (10, 9))], 15, 40),
        ([row(5)], 9, 0),
        ([row(5, (13, 9)), row(5, (10, 10))], 13, 90),
    ],
)
def test_the_largest_cap_is_the_last_with_which_all_rows_fit(rows: list[PlannedRow], limit: int, cap: int) -> None:
    images: Any = Squares()
    assert largest_cap(rows, images, limit) == cap
    images.pixels_of_token = 0
    assert largest_cap(rows, images, limit) == 0


ROWS = [
    row(3, where="text"),
    row(5, (10, 10), where="one"),
    row(4, (10, 3), (10, 8), where="two"),
    row(9, None, where="headless"),
    row(9, (13, 2), where="odd"),
]


def planned(calls: Any, rows: list[PlannedRow], *, limit: int, most: int = -1, least_pixels: int = 40) -> Any:
    """The plan of rows as they are."""
    images = Squares()
    images.least_pixels = least_pixels
    calls.put(
        image_tokens,
        tokenizer_with_images=images,
        row_images=SimpleNamespace(column=ImageColumn("image", most)),
        renderer_for=calls.double("renderer"),
        PlannedImages=images,
    )
    calls.replace(image_tokens, HfProcessor=Squares, _sampled=lambda data, column: (rows, 99))
    calls.replace(image_tokens, _planned=lambda row, text, found: row)
    return image_plan(calls.double("settings"), limit=limit, limit_flag="--prompt_max_len")


def test_a_plan_counts_rows_images_pixels_and_tokens(calls: Any) -> None:
    plan = planned(calls, ROWS, limit=14)
    assert asdict(plan) == {
        "num_rows": 99,
        "num_sampled": 5,
        "num_images": 5,
        "images_a_row": (1, 2),
        "pixels": (26, 100),
        "tokens_a_row": (10, 10.5, 11),
        "longest": 14,
        "longest_row": "one",
        "limit": 14,
        "limit_flag": "--prompt_max_len",
        "too_long": 0,
        "too_many": 0,
        "most_images": 2,
        "unreadable": 2,
        "first_unreadable": "headless",
        "remedy": "",
    }
    assert calls.taken()[:2] == [
        "tokenizer_with_images(settings.model, settings.images)",
        f"PlannedImages({image_tokens.tokenizer_with_images.returns!r})",  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize(("most", "too_many"), [(-1, 0), (0, 4), (1, 1), (2, 0)])
def test_rows_with_more_images_than_are_allowed_are_counted(calls: Any, most: int, too_many: int) -> None:
    assert planned(calls, ROWS, limit=99, most=most).too_many == too_many


@pytest.mark.parametrize(
    ("limit", "least_pixels", "too_long", "remedy"),
    [
        (13, 40, 1, "--max_pixels 90 or --prompt_max_len 14"),
        (13, 90, 1, "--max_pixels 90 or --prompt_max_len 14"),
        (13, 91, 1, "--max_pixels 90 --min_pixels 10 or --prompt_max_len 14"),
        (12, 40, 2, "--max_pixels 70 or --prompt_max_len 14"),
        (2, 40, 3, "--prompt_max_len 14"),
    ],
)
def test_rows_that_are_too_long_have_a_remedy(
    calls: Any, limit: int, least_pixels: int, too_long: int, remedy: str
) -> None:
    plan = planned(calls, ROWS, limit=limit, least_pixels=least_pixels)
    assert (plan.too_long, plan.remedy) == (too_long, remedy)


def test_without_an_image_that_can_be_counted_there_is_no_plan(calls: Any) -> None:
    assert planned(calls, [row(3), row(5)], limit=9) is None
    assert planned(calls, [row(3), row(5, None)], limit=9) is None
    plan = planned(calls, [row(5, (10, 10))], limit=99)
    assert (plan.unreadable, plan.first_unreadable) == (0, "")


def sampled(calls: Any, *lengths: int, most: int = 512, output: str | None = None) -> tuple[Any, list[Any]]:
    """The numbers of the rows that are looked at of each source, with what they are read by."""
    read: list[Any] = []
    specs = [SimpleNamespace(name=f"s{number}", path=f"p{number}") for number in range(len(lengths))]
    tables = {spec.path: list(range(length)) for spec, length in zip(specs, lengths, strict=True)}
    calls.put(
        image_tokens,
        "renderer_for",
        located_sources=specs,
        tokenizer_with_images=Squares(),
        PlannedImages=Squares(),
        row_images=SimpleNamespace(column=ImageColumn("image", 2, True)),
    )

    def rows_of(picked: Any, **given: Any) -> Any:
        read.append((picked, given))
        sizes = [SimpleNamespace(size=(10, 10), where="place")]
        return [SimpleNamespace(output=output, images=sizes, prompt_id="p") for _ in picked]

    calls.replace(
        image_tokens,
        HfProcessor=Squares,
        SAMPLED=most,
        rows_of_source=lambda spec, split: (tables[spec.path], calls.made.append(f"split {split}"))[0],
        as_read=lambda rows, keys: SimpleNamespace(rows=rows, keys=keys),
        prompts_from_rows=rows_of,
    )
    calls.replace(image_tokens, renderer_for=lambda *given: SimpleNamespace(text=lambda row: "abc"))
    data = SimpleNamespace(prompt_data="a,b", prompt_data_probs="", prompt_split="", input_key="input")
    if output is not None:
        data.output_key = "output"
    settings: Any = SimpleNamespace(data=data, model="model", images="images")
    return image_plan(settings, limit=99, limit_flag="--max_len"), read


def test_rows_of_every_source_are_looked_at_evenly_spread(calls: Any) -> None:
    plan, read = sampled(calls, 10, 3, most=6)
    assert [picked for picked, _ in read] == [[0, 2, 4, 6, 8], [0, 1]]
    assert (plan.num_rows, plan.num_sampled) == (13, 7)
    for number, (_, given) in enumerate(read):
        assert given == {
            "source": f"s{number}",
            "input_key": "input",
            "output_key": None,
            "images": ImageColumn("image", -1, True),
        }
    made = calls.taken()
    assert "located_sources('a,b', None, flag='--prompt_data', split='')" in made
    assert made.count("split None") == 2
    plan, read = sampled(calls, 10, 3)
    assert [picked for picked, _ in read] == [list(range(10)), list(range(3))]


@pytest.mark.parametrize(("output", "longest"), [(None, 12), ("", 13), ("four", 17)])
def test_a_demonstration_has_its_output_and_one_end_token_too(calls: Any, output: str | None, longest: int) -> None:
    plan, read = sampled(calls, 2, output=output)
    assert (plan.longest, plan.longest_row) == (longest, "place")
    assert read[0][1]["output_key"] == (None if output is None else "output")


def test_a_row_without_images_is_named_by_its_prompt() -> None:
    images: Any = Squares()
    given: Any = SimpleNamespace(output=None, images=(), prompt_id="p:3")
    ours = image_tokens._planned  # pyright: ignore[reportPrivateUsage]
    assert ours(given, "abc", images) == PlannedRow("p:3", 3, ())
