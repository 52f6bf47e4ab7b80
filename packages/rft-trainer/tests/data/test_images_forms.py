"""Forms of an image in a row, read directly: which values are taken, and what is refused on the way."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.images import ImageColumn, RowImage, images_of
from rft_trainer.data.readers.rows import Row
from rft_trainer.tasks.drawn_images import drawings

PNG, OTHER = (drawing.png for drawing in drawings(0, "test", 2))
COLUMN = ImageColumn("image")


def read(folder: Path, fields: dict[str, Any], column: ImageColumn = COLUMN) -> tuple[RowImage, ...]:
    return images_of(Row(fields, str(folder / "rows.jsonl"), 3), column)


def code(folder: Path, fields: dict[str, Any], column: ImageColumn = COLUMN) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, fields, column)
    return caught.value.problem.code


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_every_form_of_bytes_is_an_image(tmp_path: Path, form: type) -> None:
    for value in (form(PNG), {"bytes": form(PNG), "path": "gone.png"}):
        (image,) = read(tmp_path, {"image": value})
        assert (image.read(), type(image.data), image.num_bytes) == (PNG, bytes, len(PNG))
    assert code(tmp_path, {"image": form(b"no image")}) == "data.not_an_image"


@pytest.mark.parametrize("form", [list, tuple])
def test_several_images_are_a_list_or_a_tuple_and_named_by_their_number(tmp_path: Path, form: type) -> None:
    images = read(tmp_path, {"image": form([PNG, OTHER])})
    assert [image.read() for image in images] == [PNG, OTHER]
    assert [image.where.partition(":3:")[2] for image in images] == ["image[0]", "image[1]"]
    (alone,) = read(tmp_path, {"image": PNG})
    assert alone.where.endswith(":3:image")


def test_the_limit_is_the_most_images_of_a_row(tmp_path: Path) -> None:
    assert code(tmp_path, {"image": PNG}, ImageColumn("image", limit=0)) == "data.too_many_images"
    assert read(tmp_path, {"image": []}, ImageColumn("image", limit=0)) == ()
    assert code(tmp_path, {"image": [PNG, OTHER]}, ImageColumn("image", limit=1)) == "data.too_many_images"
    assert len(read(tmp_path, {"image": [PNG, OTHER]}, ImageColumn("image", limit=2))) == 2
    assert len(read(tmp_path, {"image": [PNG] * 40})) == 40


def test_a_name_with_a_dot_is_a_field_or_a_path_through_objects(tmp_path: Path) -> None:
    column = ImageColumn("a.b")
    assert read(tmp_path, {"a": {"b": PNG}}, column)[0].data == PNG
    assert read(tmp_path, {"a.b": OTHER, "a": {"b": PNG}}, column)[0].data == OTHER
    for fields in ({"a": "text"}, {"a": {"c": PNG}}, {"a": None}, {}):
        assert read(tmp_path, fields, column) == ()


def test_an_address_has_its_scheme_at_the_beginning(tmp_path: Path) -> None:
    assert code(tmp_path, {"image": "abcdefghi://host/a.png"}) == "data.image_address"
    assert code(tmp_path, {"image": "abcdefghij://host/a.png"}) == "data.image_file"


def test_a_list_as_text_has_both_brackets(tmp_path: Path) -> None:
    for name in ("[a.png", "a.png]"):
        (tmp_path / name).write_bytes(PNG)
        assert read(tmp_path, {"image": name})[0].read() == PNG
    assert code(tmp_path, {"image": " [a.png] "}) == "data.images_as_text"


def test_a_data_uri_is_base64_and_nothing_else(tmp_path: Path) -> None:
    body = base64.b64encode(PNG).decode()
    assert read(tmp_path, {"image": f"data:image/png;base64,{body}"})[0].data == PNG
    wrong = [
        f"data:image/png,{body}",
        f"data:image/png;base64{body}",
        f"data:image/png;base64,{body[:8]}\n{body[8:]}",
        f"data:image/png;base64,{base64.b64encode(b'no image').decode()}",
    ]
    assert [code(tmp_path, {"image": text}) for text in wrong] == ["data.not_an_image"] * 4


def test_a_file_is_read_up_to_64_mebibytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    os.truncate(tmp_path / "a.png", 64 * 2**20)
    assert code(tmp_path, {"image": "a.png"}) == "data.not_an_image"
    (tmp_path / "b.png").write_bytes(PNG)
    os.truncate(tmp_path / "b.png", 64 * 2**20 + 1)
    assert code(tmp_path, {"image": "b.png"}) == "data.image_file"
