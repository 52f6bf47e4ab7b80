"""Rewards that see the images of a prompt: where they stand in a question, and that nobody else places one."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import ServiceError
from rft_trainer.data.images import RowImage
from rft_trainer.data.media_cache import StoredMedia
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.images import (
    HeldImages,
    data_uri,
    files_of,
    message_parts,
    probe_image,
    sources_of,
    with_places,
    without_markers,
)
from rft_trainer.rewards.in_process import FunctionReward
from rft_trainer.rewards.judge import JudgeReward, asked_text
from rft_trainer.rewards.judge_template import JudgeTemplate, Verdict
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.reward_model import ModelReward
from rft_trainer.rewards.servers.http_client import Endpoint
from rft_trainer.rewards.servers.remote_judge import RemoteJudge
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward
from rft_trainer.settings.rewards import JudgeSettings
from rft_trainer.tasks.drawn_images import drawings

FIRST, SECOND = (drawing.png for drawing in drawings(0, "test", 2))
ONE, TWO = HeldImages((FIRST,)), HeldImages((FIRST, SECOND))
PATTERN = JudgeSettings().judge_pattern
WriteReward = Callable[[str], Path]


def item(prompt: str, response: str, media: Any = None, *, label: str | None = "x", messages: Any = ()) -> RewardItem:
    return RewardItem(f"p:{prompt}", prompt, response, label, "stop", 1, messages, media)


@pytest.mark.parametrize(
    ("text", "num_images", "expected"),
    [
        ("<image>a<image>b", 2, "<image>a<image>b"),
        ("a", 2, "<image><image>a"),
        ("<image>a", 2, "<image><image>a"),
        ("<image>a<image>b<image>", 1, "<image>a(image)b(image)"),
        ("a<image>b", 0, "a(image)b"),
        ("", 0, ""),
    ],
)
def test_a_text_gets_as_many_places_as_images(text: str, num_images: int, expected: str) -> None:
    found = with_places(text, num_images)
    assert found == expected
    assert found.count("<image>") == num_images


def test_a_conversation_shows_its_images_in_their_places() -> None:
    parts = [{"type": "text", "text": "left "}, {"type": "image"}, {"type": "text", "text": " right"}]
    user = {"role": "user", "content": parts}
    assert asked_text(item("rendered", "", ONE, messages=(user,))) == "left <image> right"
    system = {"role": "system", "content": "look"}
    assert asked_text(item("rendered", "", ONE, messages=(system, user))) == "system: look\nuser: left <image> right"


def test_parts_of_a_message_hold_the_files_themselves() -> None:
    assert message_parts("<image>a<image>", (FIRST, SECOND)) == [
        {"type": "image_url", "image_url": {"url": data_uri(FIRST)}},
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": data_uri(SECOND)}},
    ]
    kind, _, body = data_uri(SECOND).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(body) == SECOND


def test_servers_are_tried_with_a_white_image_of_two_features_a_side() -> None:
    png, chunks, at = probe_image(), dict[bytes, bytes](), 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        chunk = png[at + 4 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length) == (zlib.crc32(chunk),)
        chunks[chunk[:4]] = chunk[4:]
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    rgb_of_8_bits = bytes([8, 2, 0, 0, 0])
    assert chunks[b"IHDR"] == struct.pack(">II", 56, 56) + rgb_of_8_bits
    assert zlib.decompress(chunks[b"IDAT"]) == (b"\0" + b"\xff" * 56 * 3) * 56


def test_neighbours_with_one_prompt_share_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FIRST)
    image = RowImage("rows:1:image", hashlib.sha256(FIRST).hexdigest(), str(tmp_path / "a.png"))
    store: Any = None
    media = StoredMedia(store, "?", (image, RowImage("rows:1:image", "", data=SECOND)), "rows:1", 2, 4)
    found = files_of([item("a", "1", media), item("a", "2", media), item("b", "3"), item("c", "4", ONE)])
    assert found == [(FIRST, SECOND), (FIRST, SECOND), (), (FIRST,)]
    assert found[0] is found[1]
    assert sources_of(item("a", "1", media)) == [str(tmp_path / "a.png"), data_uri(SECOND)]
    assert sources_of(item("a", "1")) == []


@dataclass(slots=True)
class Asked:
    """A judge that says 5 and remembers."""

    seen: list[Any] = field(default_factory=list[Any])

    def ask(self, questions: Sequence[str], keys: Sequence[int], images: Any = None) -> list[str | Score]:
        self.seen.append((list(questions), list(keys), images))
        return ["<score>5</score>"] * len(questions)

    def close(self) -> None:
        pass


def test_a_judge_is_shown_the_images_where_the_question_shows_the_prompt() -> None:
    judge = Asked()
    reward = JudgeReward(judge, JudgeTemplate("Q {prompt} A {response} L {label}"), Verdict(PATTERN), seed=3)
    items = [item("<image>or<image>?", "see <image>!", TWO, label="<image>"), item("1+1", "<image>", None)]
    assert [score.value for score in reward(items)] == [0.5, 0.5]
    ((questions, keys, images),) = judge.seen
    assert questions == ["Q <image>or<image>? A see (image)! L (image)", "Q 1+1 A (image) L x"]
    assert images == [(FIRST, SECOND), ()]
    reward([item("<image>or<image>?", "see <image>!", HeldImages((SECOND, FIRST)), label="<image>")])
    assert judge.seen[1][1][0] != keys[0], "another image is another question"


def test_a_question_without_the_prompt_gets_the_images_in_front_and_one_with_it_twice_gets_them_once() -> None:
    judge = Asked()
    for template in ("Is {response} good?", "{prompt} {prompt} {response}", "See <image>: {prompt} {response}"):
        JudgeReward(judge, JudgeTemplate(template), Verdict(PATTERN), seed=3)([item("<image>?", "r", ONE)])
    assert [call[0][0] for call in judge.seen] == [
        "<image>Is r good?",
        "<image>? (image)? r",
        "See <image>: (image)? r",
    ]


def test_questions_of_text_alone_are_asked_as_before() -> None:
    judge = Asked()
    JudgeReward(judge, JudgeTemplate("Q {prompt} {response}"), Verdict(PATTERN), seed=3)([item("<image>", "r")])
    assert judge.seen[0][0] == ["Q <image> r"]
    assert judge.seen[0][2] is None
    assert without_markers("<image>") == "(image)"


@dataclass(slots=True)
class Scorer:
    """Scores by the number of images."""

    heads: tuple[str, ...] = ("score",)
    asked: list[Any] = field(default_factory=list[Any])

    def score(
        self,
        prompts: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]]],
        responses: Sequence[str],
        images: Sequence[tuple[bytes, ...]] | None = None,
    ) -> list[Mapping[str, float] | str]:
        self.asked.append(images)
        return [{"score": float(len(images[place]) if images else 0)} for place in range(len(prompts))]


def test_a_reward_model_is_given_the_images_of_each_prompt() -> None:
    scorer = Scorer()
    reward = ModelReward("rm", scorer, {"score": 1.0})
    assert [s.value for s in reward([item("a", "1", TWO), item("a", "2", TWO), item("b", "3")])] == [2.0, 2.0, 0.0]
    reward([item("b", "3")])
    assert scorer.asked == [[(FIRST, SECOND), (FIRST, SECOND), ()], None]


SEES = """def reward_fn(responses, labels, *, images):
    return [float(sum(len(one) for one in seen)) for seen in images]
"""


def test_a_function_may_ask_for_the_images(write_reward: WriteReward) -> None:
    expected = [float(len(data_uri(FIRST)) + len(data_uri(SECOND)))] * 2 + [0.0]
    items = [item("a", "1", TWO), item("a", "2", TWO), item("b", "3")]
    reward = reward_by_name(f"{write_reward(SEES)}:reward_fn")
    assert [score.value for score in reward(items)] == expected
    reward.close()

    def here(responses: list[str], labels: list[str], *, images: list[list[str]]) -> list[float]:
        return [float(sum(map(len, seen))) for seen in images]

    assert [score.value for score in FunctionReward(here)(items)] == expected


class Server:
    """A judge and a reward server in one, which may refuse images."""

    def __init__(self, *, sees: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                blind = not sees and "image" in json.dumps(body)
                if "messages" in body and "model" in body:
                    answer: Any = {"choices": [{"message": {"content": "<score>7</score>"}}]}
                else:
                    answer = {"rewards": [float(len(files)) for files in body.get("images", [[]])]}
                content = json.dumps({"error": "no images here"} if blind else answer).encode()
                self.send_response(400 if blind else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """One that sees, one that does not."""
    made = Server(), Server(sees=False)
    yield made
    for server in made:
        server.close()


def test_a_judge_behind_a_server_gets_images_as_parts_of_its_message(servers: tuple[Server, Server]) -> None:
    server = servers[0]
    judge = RemoteJudge(Endpoint(f"{server.url}/v1/chat/completions", 20.0, 0), "big", max_new_tokens=9)
    judge.start(with_image=True)
    assert [part["type"] for part in server.bodies[0]["messages"][0]["content"]] == ["image_url", "text"]
    reward = JudgeReward(judge, JudgeTemplate("{prompt} {response}"), Verdict(PATTERN), seed=3)
    assert [s.value for s in reward([item("which?<image>", "r", ONE), item("1+1", "2")])] == [0.7, 0.7]
    asked = sorted((body["messages"][0]["content"] for body in server.bodies[1:]), key=str)
    assert asked == [
        "1+1 2",
        [
            {"type": "text", "text": "which?"},
            {"type": "image_url", "image_url": {"url": data_uri(FIRST)}},
            {"type": "text", "text": " r"},
        ],
    ]


def test_a_reward_server_gets_images_as_data(servers: tuple[Server, Server]) -> None:
    server = servers[0]
    reward = RemoteReward("far", Endpoint(server.url, 20.0, 0))
    reward.start(with_image=True)
    assert server.bodies[0]["images"] == [[data_uri(probe_image())]]
    assert [s.value for s in reward([item("a", "1", TWO), item("b", "2")])] == [2.0, 0.0]
    assert server.bodies[1]["images"] == [[data_uri(FIRST), data_uri(SECOND)], []]
    reward([item("b", "2")])
    assert "images" not in server.bodies[2]


def test_a_server_that_sees_nothing_is_found_before_the_run_begins(servers: tuple[Server, Server]) -> None:
    url = servers[1].url
    judge = RemoteJudge(Endpoint(f"{url}/v1/chat/completions", 20.0, 0), "big", max_new_tokens=9)
    judge.start()
    with pytest.raises(ServiceError) as caught:
        judge.start(with_image=True)
    assert caught.value.problem.code == "reward.judge"
    assert "no images here" in caught.value.problem.what, "the server's own words"
    assert caught.value.problem.do.startswith("serve a vision-language model")
    with pytest.raises(ServiceError):
        RemoteReward("far", Endpoint(url, 20.0, 0)).start(with_image=True)
