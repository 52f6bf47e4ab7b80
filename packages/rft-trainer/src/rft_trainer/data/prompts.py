"""Prompts from data rows: the fields of input, label and target output."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any

from rft_core.errors import DataError
from rft_core.json_records import compiled_encoder
from rft_trainer.data.columns import Columns
from rft_trainer.data.image_placeholders import check_column, check_images, check_mixture, check_no_column
from rft_trainer.data.images import ImageColumn, RowImage, images_of
from rft_trainer.data.message_content import Content, as_template_content, content_of
from rft_trainer.data.readers.rows import Row, SkipLog, shown, wrong_type

_BYTES = object()
"""Marks a value of bytes, which no JSON holds."""

HASH_SCHEME = 1
"""Number of the way in which rows of every kind are hashed: raised by each change that gives equal rows another hash.

Runs record it beside the hash. Runs of versions before it record none, and their rows may have been hashed otherwise.
"""

_ENCODE = compiled_encoder()
_HASHED_AT_ONCE = 4096
"""Rows whose bytes are in memory together while they are hashed."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of `ROLES`."""

    role: str
    content: Content
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields for the chat template, such as `tool_calls`; of whole conversations alone."""
    learned: bool | None = None
    """Whether the message itself says that it is learned (`train`, or `weight` 0 or 1); None = it says nothing."""

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the form that chat templates take."""
        return {"role": self.role, "content": as_template_content(self.content), **self.others}


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Prompt of one data row with its label; exactly one of `text` and `messages` is set.

    `prompt_id` is "<source>:<row index>", where the index counts the rows of the source from 0.
    `label` goes to the rewards as it stands (a whole solution is fine), `output` is the text that
    supervised training imitates.

    Example: `PromptRow("gsm8k:0", "What is 1+1?", None, "#### 2", None, "gsm8k", 0)`
    """

    prompt_id: str
    text: str | None
    messages: tuple[Message, ...] | None
    label: Any
    output: str | None
    source: str
    index: int
    images: tuple[RowImage, ...] = ()
    """Images in the order of their placeholders in the text or the messages."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the row as JSON, where code of the user scores; else empty."""
    is_conversation: bool = False
    """Whether `messages` are a whole conversation, some turns of which are learned, and no prompt to answer."""
    weight: float = 1.0
    """Weight of the row in the loss of demonstrations."""
    place: str = field(default="", compare=False)
    """file:line of the row, for messages."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"{self.prompt_id}: exactly one of text and messages must be given")


def prompts_from_rows(
    rows: Sequence[Row],
    *,
    source: str,
    input_key: str,
    label_key: str | None = None,
    output_key: str | None = None,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
    whole_rows: bool = False,
    conversations: bool = False,
    weight_key: str | None = None,
    first: int = 0,
) -> list[PromptRow]:
    """Build one prompt a row. A key may be dotted to reach into nested objects (`reward_model.ground_truth`).

    Numbers become text; with `whole_rows` a label is any JSON value, and all columns are kept. With `conversations`
    the prompts are whole conversations, some turns of which are learned. `first` is the number of the first row.

    Raises `DataError` for a missing (`MissingColumnError`), null or wrongly typed field, and, with `images`, for an
    image that is none, or whose place is not clear.
    """
    skips = skips if skips is not None else SkipLog()
    named = {
        "--input_key": input_key,
        "--label_key": label_key,
        "--output_key": output_key,
        "--weight_key": weight_key,
    }
    columns = Columns(rows, {flag: key for flag, key in named.items() if key})
    prompts: list[PromptRow] = []
    for index, row in enumerate(rows, start=first):
        try:
            if conversations:
                text, messages = None, conversation_of(row, input_key, columns, with_images=images is not None)
                pictures = _images(row, images, text, messages, input_key)
            else:
                text, messages, pictures = prompt_of(row, input_key, columns, images)
            label = _label(row, label_key, columns, whole_rows) if label_key else None
            own_columns = _columns(row, images) if whole_rows else {}
            output = _as_text(row, output_key, "--output_key", columns) if output_key else None
            weight = _weight(row, weight_key, columns) if weight_key else 1.0
        # the row is left out and keeps its number, so that the ids of later rows do not move
        except DataError as error:
            skips.take(error)
            continue
        name = f"{source}:{index}"
        prompts.append(
            PromptRow(
                name,
                text,
                messages,
                label,
                output,
                source,
                index,
                pictures,
                own_columns,
                is_conversation=conversations,
                weight=weight,
                place=row.where(),
            )
        )
    return prompts


def prompt_of(
    row: Row, key: str, columns: Columns, images: ImageColumn | None
) -> tuple[str | None, tuple[Message, ...] | None, tuple[RowImage, ...]]:
    """(text, messages, images) of the prompt in one column of a row; one of the first two is None.

    Raises:
        DataError: as `prompts_from_rows` does.
    """
    text, messages = _text_or_messages(row, key, columns, with_images=images is not None)
    return text, messages, _images(row, images, text, messages, key)


def _weight(row: Row, key: str, columns: Columns) -> float:
    """Return the weight of a row: a finite number of at least 0."""
    value = columns.field(row, key, "--weight_key")
    number = value if isinstance(value, int | float | Decimal) and not isinstance(value, bool) else None
    if number is None or not math.isfinite(number) or number < 0:
        raise wrong_type(row, key, shown(value), "the weight of a row is a finite number of at least 0")
    return float(number)


def _label(row: Row, key: str, columns: Columns, any_value: bool) -> Any:
    """Return the label: a text, or with `any_value` what stands in the row."""
    if not any_value:
        return _as_text(row, key, "--label_key", columns)
    value = json_value(columns.field(row, key, "--label_key"))
    if value is _BYTES:
        raise wrong_type(row, key, "bytes", "a label is text or another JSON value")
    return value


def _columns(row: Row, images: ImageColumn | None) -> dict[str, Any]:
    """Return the columns of a row as JSON, without that of the images and those of bytes."""
    own = images.key if images is not None else None
    found = {name: json_value(value) for name, value in row.fields.items() if name != own}
    return {name: value for name, value in found.items() if value is not _BYTES}


def json_value(value: Any) -> Any:
    """Return a value of a data file as JSON: times as text in ISO form; bytes, and what holds them, as `_BYTES`."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        entries = {str(name): json_value(entry) for name, entry in value.items()}
        return _BYTES if any(entry is _BYTES for entry in entries.values()) else entries
    if isinstance(value, list | tuple):
        items = [json_value(item) for item in value]
        return _BYTES if any(item is _BYTES for item in items) else items
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _BYTES
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _images(
    row: Row, column: ImageColumn | None, text: str | None, messages: tuple[Message, ...] | None, input_key: str
) -> tuple[RowImage, ...]:
    if column is None:
        check_no_column(row, input_key, text)
        return ()
    check_column(row, column)
    images = images_of(row, column)
    check_mixture(row, column, len(images))
    contents = [text] if text is not None else [message.content for message in messages or ()]
    check_images(row, input_key, column, contents, len(images))
    return images


def content_hash(prompts: Sequence[PromptRow]) -> str:
    """Compute the SHA-256 of ids, inputs, labels, outputs and images in order: equal only for the same data."""
    digest = hashlib.sha256()
    for start in range(0, len(prompts), _HASHED_AT_ONCE):
        digest.update(content_records(prompts[start : start + _HASHED_AT_ONCE]))
    return digest.hexdigest()


def content_records(prompts: Iterable[PromptRow]) -> bytes:
    """Return the bytes that `content_hash` hashes: those of all rows are these of any parts of them, in order."""
    # one line a record, so that no two lists of prompts come to the same bytes
    return "".join([_ENCODE(_content(prompt)) + "\n" for prompt in prompts]).encode()


def _content(prompt: PromptRow) -> list[Any]:
    messages = None if prompt.messages is None else [_hashed(message) for message in prompt.messages]
    record = [prompt.prompt_id, prompt.text, messages, prompt.label, prompt.output]
    # only where there are any: data without images have one hash, with and without an image column
    if prompt.images:
        record.append([image.digest for image in prompt.images])
    # as with images: a column of ones is no column
    if prompt.weight != 1.0:
        record.append(prompt.weight)
    # only where a reward may read them; in order of their names, which says nothing
    if prompt.columns:
        record.append(json.dumps(prompt.columns, sort_keys=True))
    return record


def _hashed(message: Message) -> list[Any]:
    # further fields only where there are any: a prompt has one hash, whichever command reads it
    more = [] if not message.others and message.learned is None else [dict(message.others), message.learned]
    return [message.role, message.content, *more]


def conversation_of(row: Row, key: str, columns: Columns, *, with_images: bool) -> tuple[Message, ...]:
    """Read a whole conversation: messages with what each says of its training, and the template's further fields.

    Raises:
        DataError: it is no list of messages, or a turn of the assistant has nothing before it.
    """
    value = columns.field(row, key, "--input_key")
    if not isinstance(value, list | tuple):
        raise wrong_type(row, key, shown(value), "the other rows hold conversations: lists of messages")
    return tuple(_turn(item, row, f"{key}[{number}]", with_images) for number, item in enumerate(value))


def _turn(item: Any, row: Row, field: str, with_images: bool) -> Message:
    if not isinstance(item, Mapping) or "role" not in item or not {"content", "tool_calls"} & item.keys():
        raise wrong_type(row, field, shown(item), "a message is an object with the keys role and content")
    if item["role"] not in ROLES:
        raise wrong_type(row, f"{field}.role", shown(item["role"]), f"a role is one of {', '.join(ROLES)}")
    # columns of a uniform type (parquet) hold null where a message lacks a field
    others = {name: value for name, value in item.items() if name not in _OWN_FIELDS and value is not None}
    content = item.get("content")
    # calls of tools come without words; templates test for "" and null alike
    content = "" if content is None and "tool_calls" in others else content
    return Message(
        item["role"],
        content_of(content, row, f"{field}.content", with_images=with_images),
        others,
        _learned(item, row, field),
    )


_OWN_FIELDS = ("role", "content", "train", "weight")


def _learned(item: Mapping[str, Any], row: Row, field: str) -> bool | None:
    """Return what a message says of its training: `"train": false`, or OpenAI's `"weight": 0`."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise wrong_type(row, f"{field}.train", shown(train), "a message is learned or not: true or false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        why = "the weight of a message is 0 or 1; --weight_key names a column of weights of whole rows"
        raise wrong_type(row, f"{field}.weight", shown(weight), why)
    if train is not None and weight is not None and train != bool(weight):
        raise wrong_type(row, field, f"train {train} and weight {weight}", "the two say the same of a message")
    return train if train is not None else None if weight is None else bool(weight)


def _text_or_messages(
    row: Row, key: str, columns: Columns, *, with_images: bool
) -> tuple[str | None, tuple[Message, ...] | None]:
    value = columns.field(row, key, "--input_key")
    if isinstance(value, list | tuple):
        return None, _messages(value, row, key, with_images)
    text = value if isinstance(value, str) else _as_text(row, key, "--input_key", columns)
    if not text.strip():
        raise wrong_type(row, key, "an empty text", "a prompt must have text")
    return text, None


def _messages(value: Sequence[Any], row: Row, key: str, with_images: bool) -> tuple[Message, ...]:
    messages: list[Message] = []
    for number, item in enumerate(value):
        field = f"{key}[{number}]"
        if not isinstance(item, Mapping) or not {"role", "content"} <= item.keys():
            raise wrong_type(row, field, shown(item), "a message is an object with the keys role and content")
        if item["role"] not in ROLES:
            raise wrong_type(row, f"{field}.role", shown(item["role"]), f"a role is one of {', '.join(ROLES)}")
        content = content_of(item["content"], row, f"{field}.content", with_images=with_images)
        messages.append(Message(item["role"], content))
    if not messages or messages[-1].role not in ("user", "tool"):
        last = messages[-1].role if messages else "nothing"
        why = "a prompt ends with the turn to be answered: user or tool"
        raise wrong_type(row, key, f"messages that end with {last}", why)
    return tuple(messages)


def _as_text(row: Row, key: str, flag: str, columns: Columns) -> str:
    value = columns.field(row, key, flag)
    if isinstance(value, str):
        return value
    # True is an int in Python, and as a label it is more likely a mistake
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    raise wrong_type(row, key, f"{type(value).__name__} {shown(value)}", "the field must be text or a number")
