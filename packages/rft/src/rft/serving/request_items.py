"""Requests of a reward server as items: JSON of lists of one length, each field checked.

The form is that of `rft_trainer.rewards.servers.remote_reward_model`. OpenRLHF's clients send `query` (prompt and
response as one text) and `prompts` without `responses`; the response is then what follows the prompt.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rft_trainer.data.images import MARKER
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.images import HeldImages
from rft_trainer.rewards.servers.remote_reward_model import PROBE_ID

_FIELDS = (
    *("responses", "prompts", "labels", "prompt_ids", "messages", "finish_reasons", "num_tokens", "columns", "images"),
    *("queries", "query"),
)
_FINISH_REASONS = ("stop", "length")


class BadRequest(Exception):
    """Error of a request: its HTTP code, and what is wrong with it."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """The responses of a request."""

    items: list[RewardItem]
    ignored: list[str]
    """Fields that nothing reads."""
    prompt_ids: list[str] | None = None
    """As the request gave them; None without any."""


def read_request(
    body: bytes, *, most: int, needed: Sequence[str] = (), trial_columns: Mapping[str, Any] | None = None
) -> ScoringRequest:
    """Return the responses that a request asks to score.

    Args:
        body: of the request, JSON in UTF-8.
        most: responses that it may hold.
        needed: columns that every response brings.
        trial_columns: those of the made-up prompt by which a client tries the server.

    Raises:
        BadRequest: no such JSON, a field of another type or length, too many responses.
    """
    fields = _json_object(body)
    prompts, responses = _texts_of(fields)
    num = len(responses)
    if num > most:
        raise BadRequest(413, f"{num} responses; one request may hold {most} (--max_request_responses)")
    labels = _list(fields, "labels", num, None, lambda value: True, "any JSON value")
    prompt_ids = _list(fields, "prompt_ids", num, "", _is_text, "texts")
    messages = _list(fields, "messages", num, [], _are_messages, "lists of messages with role and content")
    reasons = _list(fields, "finish_reasons", num, "stop", lambda value: value in _FINISH_REASONS, "stop or length")
    num_tokens = _list(fields, "num_tokens", num, 0, _is_count, "whole numbers of 0 or more")
    columns = _list(fields, "columns", num, {}, lambda value: isinstance(value, dict), "objects")
    columns = [
        {**(trial_columns or {}), **own} if name == PROBE_ID else own
        for name, own in zip(prompt_ids, columns, strict=True)
    ]
    _require_columns(columns, needed)
    images = _list(fields, "images", num, [], _are_texts, "lists of data URIs")
    items: list[RewardItem] = []
    for index in range(num):
        media = _media(images[index], prompts[index], messages[index], index)
        # samples of one prompt share its images, by which readers know that they are the same
        if items and media is not None and items[-1].media == media:
            media = items[-1].media
        items.append(
            RewardItem(
                prompt_id=prompt_ids[index] or f"request:{index}",
                prompt_text=prompts[index],
                response_text=responses[index],
                label=labels[index],
                finish_reason=reasons[index],
                num_tokens=num_tokens[index],
                messages=tuple(messages[index]),
                media=media,
                columns=columns[index],
            )
        )
    return ScoringRequest(items, sorted(set(fields) - set(_FIELDS)), prompt_ids if "prompt_ids" in fields else None)


def as_answer(
    scores: Sequence[Score], ignored: Sequence[str], prompt_ids: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the JSON of an answer: an entry a response, in order; one without a score says why.

    `prompt_ids` are those of the request, by which a client knows the answer for its own.
    """
    entries = [
        {"reward": None, "status": str(score.status), "detail": score.detail}
        if score.value is None
        else {"reward": score.value, "parts": dict(score.breakdown)}
        | ({"steps": [list(step) for step in score.steps]} if score.steps else {})
        for score in scores
    ]
    ids = {} if prompt_ids is None else {"prompt_ids": list(prompt_ids)}
    return {"rewards": entries} | ids | ({"ignored": list(ignored)} if ignored else {})


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(400, f"no UTF-8: {error}") from error
    except RecursionError as error:
        raise BadRequest(400, "no JSON that can be read: too deeply nested") from error
    except ValueError as error:
        raise BadRequest(400, f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(400, f'an object with "responses" and "prompts" is expected, got {type(value).__name__}')
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    # 1e999 is a number of JSON, and infinite as a float
    if any(isinstance(value, float) and not math.isfinite(value) for value in found.values()):
        raise ValueError("a number that is too large")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _texts_of(fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return prompts and responses."""
    if "responses" in fields:
        responses = _texts(fields, "responses")
        return _list(fields, "prompts", len(responses), "", _is_text, "texts"), responses
    name = next((name for name in ("query", "queries") if name in fields), "")
    if not name or "prompts" not in fields:
        raise BadRequest(400, '"responses" is missing: a list with the text of each response')
    queries = _texts(fields, name)
    prompts = _list(fields, "prompts", len(queries), "", _is_text, "texts")
    for index, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not query.startswith(prompt):
            raise BadRequest(400, f'{name}[{index}] does not begin with prompts[{index}]; send "responses"')
    return prompts, [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields[name]
    if not isinstance(value, list):
        raise BadRequest(400, f"{name} is {type(value).__name__}; a list of texts is expected")
    entries = cast("list[Any]", value)
    return _list(fields, name, len(entries), "", _is_text, "texts")


def _list(
    fields: Mapping[str, Any], name: str, length: int, default: Any, allowed: Callable[[Any], bool], expected: str
) -> list[Any]:
    """Return the entries of a field, `default` for each where it is missing."""
    if fields.get(name) is None:
        return [default] * length
    value = fields[name]
    if not isinstance(value, list):
        raise BadRequest(400, f"{name} is {type(value).__name__}; a list of {expected} is expected")
    entries = cast("list[Any]", value)
    if len(entries) != length:
        raise BadRequest(400, f"{name} has {len(entries)} entries for {length} responses")
    for index, entry in enumerate(entries):
        if not allowed(entry):
            raise BadRequest(400, f"{name}[{index}] is {str(entry)[:60]!r}; {expected} are expected")
    return entries


def _require_columns(columns: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> None:
    """Refuse a response without a column that the reward reads: it would be scored without it."""
    for index, row in enumerate(columns):
        for name in needed:
            if name not in row:
                raise BadRequest(400, f"columns[{index}] lacks {name!r}, which the reward reads (--reward_columns)")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, cast("list[Any]", value)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, cast("list[Any]", value)))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    message = cast("dict[str, Any]", value)
    content = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    return isinstance(message.get("role"), str) and (
        isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in parts))
    )


def _media(uris: Sequence[str], prompt: str, messages: Sequence[Mapping[str, Any]], index: int) -> HeldImages | None:
    """Return the images of a prompt; each has one place in it."""
    places = prompt.count(MARKER) if not messages else sum(map(_places, messages))
    if not uris:
        return None
    if places != len(uris):
        raise BadRequest(400, f"images[{index}] has {len(uris)} images for {places} places in the prompt")
    return HeldImages(tuple(_image(uri, index) for uri in uris))


def _places(message: Mapping[str, Any]) -> int:
    content = message["content"]
    if isinstance(content, str):
        return content.count(MARKER)
    return sum(part.get("type") == "image" for part in content)


def _image(uri: str, index: int) -> bytes:
    head, comma, data = uri.partition(",")
    # an address is fetched by nobody here: it may be one that only this machine reaches
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise BadRequest(400, f"images[{index}]: {uri[:60]!r} is no data URI (data:image/png;base64,...)")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise BadRequest(400, f"images[{index}]: {error}") from error
