"""Images of rows: every form they come in, every place they can be wrong, and the control that exchanges them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.images import ImageColumn, RowImage
from rft_trainer.data.media_cache import MediaStore, StoredMedia, load_media
from rft_trainer.data.prompts import PromptRow, content_hash, prompts_from_rows
from rft_trainer.data.readers.formats import read_rows
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.tasks.drawn_images import KINDS, QUESTIONS, drawings
from rft_trainer.tasks.shuffled_images import shuffle_images

PNG, OTHER = (drawing.png for drawing in drawings(0, "test", 2))
COLUMN = ImageColumn("image")


@dataclass(frozen=True)
class Prepared:
    """What the tokenizer below makes of images: two features for each."""

    images: tuple[bytes, ...]

    @property
    def num_images(self) -> int:
        return len(self.images)

    @property
    def num_tokens(self) -> int:
        return 2 * len(self.images)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple((0, 2) for _ in self.images)


class FakeProcessor:
    """One token a character; each marker becomes two placeholders, 7."""

    has_chat_template, pad_id, eos_ids, vocab_size = True, 0, (2,), 0x110000

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * add_special_tokens + list(map(ord, text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        def text(content: Any) -> str:
            if isinstance(content, str):
                return content
            return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)

        return "".join(f"{m['role']}:{text(m['content'])};" for m in messages) + "assistant:" * add_generation_prompt

    def encode_media(
        self, prompt: str, images: Sequence[bytes], *, where: str = "prompt"
    ) -> tuple[list[int], Prepared | None]:
        self.calls += 1
        assert prompt.count("<image>") == len(images), where
        pieces = prompt.split("<image>")
        ids = [token for n, piece in enumerate(pieces) for token in ([7, 7] * (n > 0) + list(map(ord, piece)))]
        return ids, Prepared(tuple(images)) if images else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(OTHER)
    (tmp_path / "notes.txt").write_text("no image at all")
    return tmp_path


def prompts(folder: Path, *rows: dict[str, Any], column: ImageColumn | None = COLUMN) -> list[PromptRow]:
    """Prompts of rows that were written to a file."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts_from_rows(read_rows(file), source="s", input_key="input", images=column)


def refused(folder: Path, *rows: dict[str, Any], column: ImageColumn = COLUMN) -> tuple[str, str]:
    """(code, place without the folder) of the problem."""
    with pytest.raises(DataError) as caught:
        prompts(folder, *rows, column=column)
    return caught.value.problem.code, caught.value.problem.where.removeprefix(f"{folder}/")


def test_an_image_comes_as_path_data_uri_bytes_or_object(folder: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    (folder / "below").mkdir()
    (folder / "below" / "c.png").write_bytes(PNG)
    values: list[Any] = ["a.png", "below/c.png", str(folder / "a.png"), uri]
    found = prompts(folder, *({"input": "what?", "image": value} for value in values))
    in_memory = [PNG, {"bytes": PNG, "path": None}, {"bytes": None, "path": "a.png"}]
    rows = [Row({"input": "what?", "image": value}, str(folder / "x.parquet"), 1) for value in in_memory]
    found += prompts_from_rows(rows, source="s", input_key="input", images=COLUMN)
    assert [[image.read() for image in row.images] for row in found] == [[PNG]] * 7
    assert {image.digest for row in found for image in row.images} == {hashlib.sha256(PNG).hexdigest()}


def test_several_images_keep_their_order(folder: Path) -> None:
    (row,) = prompts(folder, {"input": "<image>or<image>?", "image": ["b.png", "a.png"]})
    assert [image.read() for image in row.images] == [OTHER, PNG]


@pytest.mark.parametrize(
    ("value", "code", "place"),
    [
        ("gone.png", "data.image_file", "rows.jsonl:2:image"),
        ("", "data.not_an_image", "rows.jsonl:2:image"),
        (["a.png", "notes.txt"], "data.not_an_image", "rows.jsonl:2:image[1]"),
        (".", "data.image_file", "rows.jsonl:2:image"),
        ("/dev/zero", "data.image_file", "rows.jsonl:2:image"),
        (17, "data.not_an_image", "rows.jsonl:2:image"),
        ("https://example.org/a.png", "data.image_address", "rows.jsonl:2:image"),
        ("data:image/png;base64,%%%", "data.not_an_image", "rows.jsonl:2:image"),
        ("data:image/png,abc", "data.not_an_image", "rows.jsonl:2:image"),
        (["a.png", "b.png"], "data.image_places", "rows.jsonl:2:input"),
        (None, "data.row_without_image", "rows.jsonl:2:image"),
        ([], "data.row_without_image", "rows.jsonl:2:image"),
    ],
)
def test_a_wrong_image_is_named_by_file_line_and_field(folder: Path, value: Any, code: str, place: str) -> None:
    rows = {"input": "fine", "image": "a.png"}, {"input": "<image>what?", "image": value}
    assert refused(folder, *rows) == (code, place)


@pytest.mark.parametrize(
    "value", ["a.png", ["a.png", "b.png"], {"bytes": None, "path": "a.png"}, "data:image/png;base64,"]
)
def test_a_column_of_images_under_another_name_is_named(folder: Path, value: Any) -> None:
    row = {"input": "<image>?", "picture": value, "label": "a"}
    for column in (COLUMN, ImageColumn("image", mixed=True)):
        with pytest.raises(DataError) as caught:
            prompts(folder, row, column=column)
        assert (caught.value.problem.code, caught.value.problem.do) == ("data.no_image_column", "--images_key picture")
    with pytest.raises(DataError) as caught:
        prompts(folder, row, column=None)
    assert (caught.value.problem.code, caught.value.problem.do) == ("data.images_not_named", "--images_key picture")


def test_texts_that_only_look_like_images_stay_texts(folder: Path) -> None:
    rows = {"input": "what is in a.png", "note": "see <image>"}, {"input": "<image> is a tag", "tags": []}
    assert [row.text for row in prompts(folder, *rows, column=None)] == [row["input"] for row in rows]
    assert len(prompts(folder, rows[0], column=ImageColumn("image", mixed=True))) == 1


def test_what_is_wrong_with_an_image_is_said_plainly(folder: Path) -> None:
    (folder / "empty.png").write_bytes(b"")
    wrong: list[tuple[Any, str, str]] = [
        ("empty.png", "data.not_an_image", "an empty file"),
        ('["a.png", "b.png"]', "data.images_as_text", "a list written as text"),
        (["a.png", "b.png"], "data.image_places", "2 images in image and 1 placeholder "),
    ]
    for value, code, words in wrong:
        with pytest.raises(DataError, match=words) as caught:
            prompts(folder, {"input": "<image>?", "image": value})
        assert caught.value.problem.code == code
    with pytest.raises(DataError) as caught:
        prompts(folder, {"input": "<image>or<image>?", "image": "a.png"})
    assert caught.value.problem.do == "write <image> once there, or give image 2 images"


def test_more_images_than_allowed_are_refused(folder: Path) -> None:
    row = {"input": "?", "image": ["a.png", "b.png"]}
    column = ImageColumn("image", limit=1)
    assert refused(folder, row, column=column) == ("data.too_many_images", "rows.jsonl:1:image")
    assert len(prompts(folder, row, column=ImageColumn("image", limit=2))[0].images) == 2


def test_rows_of_text_stand_beside_images_where_that_is_announced(folder: Path) -> None:
    rows = {"input": "<image>?", "image": "a.png"}, {"input": "1+1="}, {"input": "2+2=", "image": []}
    assert refused(folder, *rows) == ("data.row_without_image", "rows.jsonl:2:image")
    found = prompts(folder, *rows, column=ImageColumn("image", mixed=True))
    assert [len(row.images) for row in found] == [1, 0, 0]
    marked = {"input": "<image>?", "image": None}
    assert refused(folder, marked, column=ImageColumn("image", mixed=True))[0] == "data.image_places"


def test_parts_of_messages_say_where_images_stand(folder: Path) -> None:
    parts = [{"type": "text", "text": "left "}, {"type": "image"}, {"type": "text", "text": " right"}]
    (row,) = prompts(folder, {"input": [{"role": "user", "content": parts}], "image": "a.png"})
    tokenizer = FakeProcessor()
    rendered = PromptRenderer(tokenizer, apply_chat_template=True, media=MediaStore(tokenizer)).render(row)
    assert rendered.text == "user:left <image> right;assistant:"
    assert rendered.token_ids.count(7) == 2
    rows = {"input": [{"role": "user", "content": parts}], "image": ["a.png", "b.png"]}
    assert refused(folder, rows) == ("data.image_places", "rows.jsonl:1:input")
    inline = [{"type": "image", "image": "a.png"}]
    rows = {"input": [{"role": "user", "content": inline}], "image": "a.png"}
    assert refused(folder, rows) == ("data.wrong_type", "rows.jsonl:1:input[0].content[0].image")
    rows = {"input": [{"role": "user", "content": [{"type": "video"}]}], "image": "a.png"}
    assert refused(folder, rows) == ("data.wrong_type", "rows.jsonl:1:input[0].content[0]")


def test_parts_without_a_column_of_images_are_refused(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        prompts(folder, {"input": [{"role": "user", "content": [{"type": "image"}]}]}, column=None)
    assert caught.value.problem.code == "data.parts_without_images"
    assert caught.value.problem.do == "--images_key images"


def test_images_without_a_place_stand_in_front(folder: Path) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}]
    turns += [{"role": "user", "content": "what?"}]
    plain, chat = prompts(folder, {"input": "what?", "image": ["a.png", "b.png"]}, {"input": turns, "image": "a.png"})
    tokenizer = FakeProcessor()
    store = MediaStore(tokenizer)
    assert PromptRenderer(tokenizer, media=store).render(plain).text == "<image><image>what?"
    (marked,) = prompts(folder, {"input": "is <image> red?", "image": "a.png"})
    assert PromptRenderer(tokenizer, media=store).render(marked).text == "is <image> red?"
    text = PromptRenderer(tokenizer, apply_chat_template=True, media=store).render(chat).text
    assert text == "user:hello;assistant:yes?;user:<image>what?;assistant:"


def test_a_row_of_text_is_rendered_as_without_images(folder: Path) -> None:
    column = ImageColumn("image", mixed=True)
    (row,) = prompts(folder, {"input": "1+1="}, column=column)
    tokenizer = FakeProcessor()
    for special in (False, True):
        seen = PromptRenderer(tokenizer, add_special_tokens=special, media=MediaStore(tokenizer)).render(row)
        plain = PromptRenderer(tokenizer, add_special_tokens=special).render(row)
        assert (seen.token_ids, seen.media) == (plain.token_ids, None)


def test_the_hash_of_the_data_follows_the_images(folder: Path) -> None:
    row = {"input": "<image>?", "image": "a.png"}
    before = content_hash(prompts(folder, row))
    assert content_hash(prompts(folder, row)) == before
    (folder / "a.png").write_bytes(OTHER)
    assert content_hash(prompts(folder, row)) != before
    text = prompts(folder, {"input": "1+1="}, column=None)
    line = json.dumps(["s:0", "1+1=", None, None, None]).encode() + b"\n"
    assert content_hash(text) == hashlib.sha256(line).hexdigest(), "rows of text hash as they did before images"


def stored(images: Sequence[RowImage], store: MediaStore) -> list[StoredMedia]:
    """A handle of each image."""
    found = [store.encode(f"{n}<image>", (image,), special=False, where="x")[1] for n, image in enumerate(images)]
    return [media for media in found if media is not None]


def test_images_are_kept_within_the_limit_and_made_again_beyond_it(folder: Path) -> None:
    rows = prompts(folder, *({"input": "?", "image": name} for name in ("a.png", "b.png", "a.png")))
    tokenizer = FakeProcessor()
    handles = stored([row.images[0] for row in rows], MediaStore(tokenizer, kept_features=4))
    assert (tokenizer.calls, [media.num_tokens for media in handles]) == (3, [2, 2, 2])
    assert load_media(handles[2]).images == (PNG,)
    assert load_media(handles[1]).images == (OTHER,)
    assert tokenizer.calls == 3, "the last two are kept"
    assert load_media(handles[0]).images == (PNG,)
    assert tokenizer.calls == 4
    assert load_media("anything else") == "anything else"


def test_an_image_that_changed_since_the_rows_were_read_is_refused(folder: Path) -> None:
    rows = prompts(folder, *({"input": "?", "image": name} for name in ("a.png", "b.png")))
    handles = stored([row.images[0] for row in rows], MediaStore(FakeProcessor(), kept_features=1))
    (folder / "a.png").write_bytes(OTHER)
    with pytest.raises(DataError) as caught:
        load_media(handles[0])
    assert caught.value.problem.code == "data.image_changed"
    assert caught.value.problem.where.endswith("rows.jsonl:1:image")


def test_the_control_gives_no_row_its_own_image_and_keeps_questions_together(folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}.png").write_bytes(PNG + bytes([number]))
    asked = ["red?"] * 4 + ["many?"] * 3 + ["alone?", "lonely?"]
    given = [{"input": text, "image": f"{number}.png"} for number, text in enumerate(asked)]
    rows = prompts(folder, *given, {"input": "text"}, column=ImageColumn("image", mixed=True))
    found = shuffle_images(rows, seed=3)
    own = [row.images for row in rows]
    assert sorted(image.digest for row in found for image in row.images) == sorted(
        image.digest for images in own for image in images
    )
    for first, last in ((0, 4), (4, 7), (7, 9)):
        assert {row.images for row in found[first:last]} == set(own[first:last])
    assert all(row.images != images for row, images in zip(found, own, strict=True) if images)
    assert found[9] == rows[9]
    assert shuffle_images(rows, seed=3) == found
    with pytest.raises(DataError) as caught:
        shuffle_images(rows[:1], seed=3)
    assert caught.value.problem.code == "data.alone_to_shuffle"


def test_drawings_are_the_same_for_a_seed_and_differ_between_splits() -> None:
    train, again, held_out = drawings(1, "train", 60), drawings(1, "train", 60), drawings(1, "heldout", 60)
    assert train == again
    assert not {drawing.png for drawing in train} & {drawing.png for drawing in held_out}
    assert Counter(drawing.kind for drawing in train) == dict.fromkeys(KINDS, 15)
    assert all(drawing.question == QUESTIONS[drawing.kind] for drawing in train)
