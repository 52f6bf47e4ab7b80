"""A model that is asked: the question, the reading of its answer, and a server that answers in its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError, ServiceError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.judge import JudgeReward, asked_text
from rft_trainer.rewards.judge_template import JudgeTemplate, Verdict
from rft_trainer.rewards.servers.http_client import Endpoint
from rft_trainer.rewards.servers.remote_judge import RemoteJudge
from rft_trainer.settings.rewards import JudgeSettings

MakeItem = Callable[..., RewardItem]
PATTERN = JudgeSettings().judge_pattern


@dataclass(slots=True)
class Scripted:
    """Answers by the question's text."""

    answers: dict[str, str | Score]
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    closed: bool = False

    def ask(self, questions: Sequence[str], keys: Sequence[int], images: Any = None) -> list[str | Score]:
        assert images is None
        self.asked += zip(questions, keys, strict=True)
        return [self.answers[question] for question in questions]

    def close(self) -> None:
        self.closed = True


def test_the_template_is_filled_once_and_other_braces_stay() -> None:
    template = JudgeTemplate("{task_instruction}: {prompt} -> {response} [{label}] {x} {{1}}", "look at {prompt}")
    filled = template.fill(prompt="p {response}", response="r {label} {prompt}", label="L")
    assert filled == "look at p {response}: p {response} -> r {label} {prompt} [L] {x} {{1}}"
    assert template.needs_label
    assert not JudgeTemplate().needs_label
    short = JudgeTemplate(task_instruction="how kind it is", low=1.0, high=5.0).fill(
        prompt="a", response="b", label=None
    )
    assert "Judge how kind it is." in short
    assert "from 1 (worst) to 5 (best)" in short


def test_a_template_comes_from_a_file_that_opens_and_has_a_place_for_the_response(tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text("{task_instruction}: {response} {low} {high}", encoding="utf-8")
    template = JudgeTemplate.in_file(file, "kind", 1.0, 5.0)
    assert template.fill(prompt="p", response="r", label=None) == "kind: r 1 5"
    with pytest.raises(OptionsError) as without_place:
        JudgeTemplate("{prompt}")
    with pytest.raises(OptionsError) as absent:
        JudgeTemplate.in_file(tmp_path / "nowhere.txt")
    file.write_bytes(b"{response} \xff")
    with pytest.raises(OptionsError) as no_text:
        JudgeTemplate.in_file(file)
    errors = [caught.value.problem for caught in (without_place, absent, no_text)]
    assert {(problem.code, problem.where) for problem in errors} == {("reward.judge_template", "--judge_template")}
    assert "{response}" in errors[0].what
    assert "nowhere.txt" in errors[1].what


def test_question_and_answer_go_from_0_to_10_where_no_range_is_given(tmp_path: Path) -> None:
    assert JudgeTemplate("{response} {low} {high}").fill(prompt="", response="r", label=None) == "r 0 10"
    file = tmp_path / "question.txt"
    file.write_text("{response} {low} {high}")
    assert JudgeTemplate.in_file(file).fill(prompt="", response="r", label=None) == "r 0 10"
    verdict = Verdict(PATTERN)
    assert [verdict.read(f"<score>{score}</score>") for score in (0, 0.5, 10)] == [0.0, 0.05, 1.0]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<score>10</score>", 1.0),
        ("<score> 0 </score>", 0.0),
        ("first <score>9</score>, no: <score>2.5</score>", 0.25),
        ("<score>-0</score>", 0.0),
    ],
)
def test_the_last_score_counts(answer: str, expected: float) -> None:
    assert Verdict(PATTERN).read(answer) == expected


def test_a_score_is_its_place_in_the_range() -> None:
    verdict = Verdict(PATTERN, -1.0, 3.0)
    assert [verdict.read(f"<score>{score}</score>") for score in (-1, 0, 2, 3)] == [0.0, 0.25, 0.75, 1.0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("It is good.", "no score"),
        ("", "no score"),
        ("<score>ten</score>", "no score"),
        ("<score>11</score>", "outside 0 to 10"),
        ("<score>-1</score>", "outside 0 to 10"),
    ],
)
def test_an_answer_without_a_score_says_so(answer: str, why: str) -> None:
    found = Verdict(PATTERN).read(answer)
    assert isinstance(found, str)
    assert why in found


def test_patterns_and_ranges_that_cannot_be_used_are_refused() -> None:
    for pattern in ("(", "score"):
        with pytest.raises(OptionsError) as caught:
            Verdict(pattern)
        assert caught.value.problem.code == "reward.judge_pattern"
    with pytest.raises(OptionsError) as caught:
        Verdict(PATTERN, 5.0, 5.0)
    assert caught.value.problem.code == "reward.judge_range"
    assert Verdict(r"(\w+)$").read("great") == "the judge's score is 'great'"
    assert Verdict(r"(nan)").read("nan") == "the judge's score nan is outside 0 to 10"


def test_what_the_judge_fails_to_say_is_a_status_of_its_own(make_item: MakeItem) -> None:
    late = Score(None, RewardStatus.TIMEOUT, detail="no answer")
    judge = Scripted({"Q a": "<score>5</score>", "Q b": "hm", "Q c": late})
    reward = JudgeReward(judge, JudgeTemplate("Q {response}"), Verdict(PATTERN), seed=3)
    scores = reward([make_item(text, None) for text in "abc"])
    assert [(score.value, score.status) for score in scores] == [
        (0.5, RewardStatus.OK),
        (None, RewardStatus.NO_VERDICT),
        (None, RewardStatus.TIMEOUT),
    ]
    assert scores[0].breakdown == {"judge": 0.5}
    assert all(score.detail for score in scores[1:])
    reward.close()
    assert judge.closed


def test_keys_follow_from_seed_and_question_alone(make_item: MakeItem) -> None:
    def keys(seed: int, *texts: str) -> dict[str, int]:
        judge = Scripted({f"Q {text}": "<score>1</score>" for text in "abc"})
        JudgeReward(judge, JudgeTemplate("Q {response}"), Verdict(PATTERN), seed=seed)([make_item(t) for t in texts])
        return dict(judge.asked)

    first = keys(3, "a", "b", "c")
    assert len(set(first.values())) == 3
    assert keys(3, "c", "a") == {name: first[name] for name in ("Q c", "Q a")}
    assert keys(4, "a")["Q a"] != first["Q a"]


def test_a_judge_that_compares_with_a_label_needs_one(make_item: MakeItem) -> None:
    judge = Scripted({"b of 18": "<score>10</score>"})
    reward = JudgeReward(judge, JudgeTemplate("{response} of {label}"), Verdict(PATTERN), seed=3)
    missing, found = reward([make_item("a", None), make_item("b", "18")])
    assert (missing.status, found.value) == (RewardStatus.UNPARSABLE, 1.0)
    assert len(judge.asked) == 1


def test_a_conversation_is_shown_as_its_turns() -> None:
    def item(*turns: dict[str, str]) -> RewardItem:
        return RewardItem("p", "<s>rendered", "x", None, "stop", 1, turns)

    user = {"role": "user", "content": "1+1?"}
    assert asked_text(item()) == "<s>rendered"
    assert asked_text(item(user)) == "1+1?"
    assert asked_text(item({"role": "system", "content": "add"}, user)) == "system: add\nuser: 1+1?"


class ChatServer:
    """An OpenAI-compatible server of one answer a path."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body))
                said = "<score>7</score>" if "Say yes" not in body["messages"][0]["content"] else "yes"
                answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
                if self.path.startswith("/empty"):
                    answer = {"choices": []}
                content = json.dumps(answer).encode()
                self.send_response(404 if self.path.startswith("/gone") else 200)
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
def chat_server() -> Iterator[ChatServer]:
    made = ChatServer()
    yield made
    made.close()


def test_a_server_is_asked_greedily_with_the_key_as_its_seed(chat_server: ChatServer, make_item: MakeItem) -> None:
    judge = RemoteJudge(Endpoint(f"{chat_server.url}/v1/chat/completions", 20.0, 0), "big", max_new_tokens=9)
    judge.start()
    reward = JudgeReward(judge, JudgeTemplate("Q {response}"), Verdict(PATTERN), seed=3)
    assert [score.value for score in reward([make_item("a"), make_item("b")])] == [0.7, 0.7]
    path, body = chat_server.requests[1]
    assert path == "/v1/chat/completions"
    seed = body.pop("seed")
    assert body == {
        "model": "big",
        "messages": [{"role": "user", "content": body["messages"][0]["content"]}],
        "temperature": 0,
        "max_tokens": 9,
    }
    assert 0 <= seed < 2**31
    assert judge.ask([], []) == []


@pytest.mark.parametrize(("path", "said"), [("gone", "HTTP 404"), ("empty", "the judge's server answered")])
def test_an_answer_of_the_server_that_is_none_is_a_status(
    path: str, said: str, chat_server: ChatServer, make_item: MakeItem
) -> None:
    judge = RemoteJudge(Endpoint(f"{chat_server.url}/{path}", 20.0, 0), "big", max_new_tokens=9)
    with pytest.raises(ServiceError) as caught:
        judge.start()
    assert caught.value.problem.code == "reward.judge"
    [score] = JudgeReward(judge, JudgeTemplate(), Verdict(PATTERN), seed=0)([make_item("a")])
    assert score.status is RewardStatus.FAILED
    assert said in score.detail
