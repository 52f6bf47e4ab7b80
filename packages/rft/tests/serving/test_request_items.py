"""Requests of a reward server: what is read, and how everything else is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rft.serving.request_items import BadRequest, as_answer, read_request
from rft_trainer.data.images import MARKER
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import HeldImages, probe_image
from rft_trainer.rewards.servers.remote_reward_model import request


def read(fields: object, **options: Any) -> list[RewardItem]:
    return read_request(json.dumps(fields).encode(), **{"most": 100, **options}).items


def refusal(body: bytes, **options: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_request(body, **{"most": 100, **options})
    return caught.value


def test_items_arrive_as_the_client_sent_them() -> None:
    turns = ({"role": "user", "content": f"{MARKER}1+1="},)
    image = HeldImages((probe_image(),))
    sent = [
        RewardItem("a:0", "1+1=", "2", {"answer": [2]}, "stop", 1, columns={"source": "sums"}),
        RewardItem("a:1", f"{MARKER}1+1=", "3", None, "length", 7, turns, image),
        RewardItem("a:1", f"{MARKER}1+1=", "4", "2", "stop", 2, turns, image),
    ]
    body = json.dumps(request(sent)).encode()
    got = read_request(body, most=3)
    assert got.items == sent
    assert got.items[1].media is got.items[2].media, "samples of a prompt share their images"
    assert got.ignored == []


def test_two_lists_of_texts_are_enough() -> None:
    [item] = read({"responses": ["2"], "prompts": ["1+1="]})
    assert item == RewardItem("request:0", "1+1=", "2", None, "stop", 0)
    assert read({"responses": []}) == []


@pytest.mark.parametrize("name", ["query", "queries"])
def test_a_response_is_what_follows_the_prompt_in_requests_of_openrlhf(name: str) -> None:
    [item] = read({name: ["1+1=2"], "prompts": ["1+1="], "labels": ["2"]})
    assert (item.prompt_text, item.response_text, item.label) == ("1+1=", "2", "2")


ADDRESSES = [
    "http://169.254.169.254/latest/meta-data",
    "http://127.0.0.1:22/",
    "http://2130706433/",
    "http://[::ffff:10.0.0.1]/",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "/etc/passwd",
    "//server/share",
    "data:text/html;base64,aaaa",
    "data:image/png,xx",
]


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({}, 400, '"responses" is missing'),
        ([], 400, "got list"),
        ({"responses": "2"}, 400, "responses is str"),
        ({"responses": [2]}, 400, "responses[0] is '2'"),
        ({"responses": ["2"], "prompts": []}, 400, "prompts has 0 entries for 1"),
        ({"responses": ["2"], "labels": "2"}, 400, "labels is str"),
        ({"responses": ["2"], "messages": [[{"role": "user"}]]}, 400, "messages[0]"),
        ({"responses": ["2"], "messages": [[1]]}, 400, "messages[0]"),
        ({"responses": ["2"], "messages": [[{"role": "user", "content": [1]}]]}, 400, "messages[0]"),
        ({"responses": ["2"], "finish_reasons": ["end"]}, 400, "finish_reasons[0]"),
        ({"responses": ["2"], "num_tokens": [-1]}, 400, "num_tokens[0]"),
        ({"responses": ["2"], "num_tokens": [True]}, 400, "num_tokens[0]"),
        ({"responses": ["2"], "columns": [1]}, 400, "columns[0]"),
        ({"responses": ["2"], "images": [[1]]}, 400, "images[0]"),
        ({"responses": ["2"], "images": [["data:image/png;base64,aaaa"]]}, 400, "1 images for 0 places"),
        ({"responses": ["2"], "prompts": [MARKER], "images": [["data:image/png;base64,?"]]}, 400, "images[0]"),
        ({"query": ["1"], "prompts": ["2"]}, 400, "query[0] does not begin with prompts[0]"),
        ({"query": ["1"]}, 400, '"responses" is missing'),
        ({"responses": ["2"] * 101}, 413, "101 responses"),
        *(({"responses": ["2"], "prompts": [MARKER], "images": [[uri]]}, 400, "no data URI") for uri in ADDRESSES),
    ],
)
def test_everything_else_is_refused_with_its_place(fields: object, code: int, said: str) -> None:
    problem = refusal(json.dumps(fields).encode())
    assert problem.code == code
    assert said in problem.detail


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no UTF-8"),
        (b'{"responses": ["2"], "labels": [NaN]}', "NaN is no JSON"),
        (b'{"responses": ["2"], "columns": [{"a": 1e999}]}', "too large"),
        (b'{"responses": ["2"], "responses": ["3"]}', "stands twice"),
        pytest.param(b"[" * 100_000, "too deeply nested", id="deep"),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, said: str) -> None:
    assert said in refusal(body).detail


def test_columns_that_the_reward_reads_are_required() -> None:
    fields = {"responses": ["2", "3"], "columns": [{"source": "a"}, {}]}
    assert "columns[1] lacks 'source'" in refusal(json.dumps(fields).encode(), needed=["source"]).detail


def test_bytes_of_any_kind_are_read_or_refused() -> None:
    whole = json.dumps(request([RewardItem("a", f"{MARKER}x", "y", 1, "stop", 1, (), HeldImages((probe_image(),)))]))
    draw = random.Random(7)
    for _ in range(2000):
        body = bytearray(whole.encode())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(body))
            body[at : at + draw.randint(0, 3)] = bytes(draw.choices(b'"[]{}:,0e9nulltrue\\\xff', k=draw.randint(0, 3)))
        try:
            items = read_request(bytes(body), most=10).items
        except BadRequest:
            continue
        assert all(isinstance(item.response_text, str) and item.num_tokens >= 0 for item in items)


def test_an_answer_has_an_entry_a_response() -> None:
    scores = [
        Score(0.5, breakdown={"clear": 0.5}, steps=((3, 0.5),)),
        Score(None, RewardStatus.TIMEOUT, detail="no answer within 1 s"),
    ]
    assert as_answer(scores, ["extra"]) == {
        "rewards": [
            {"reward": 0.5, "parts": {"clear": 0.5}, "steps": [[3, 0.5]]},
            {"reward": None, "status": "timeout", "detail": "no answer within 1 s"},
        ],
        "ignored": ["extra"],
    }
    assert as_answer([], []) == {"rewards": []}
    assert as_answer(scores[:1], [], ["a"])["prompt_ids"] == ["a"]
