"""The task of a process that holds a user's environments, called in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.environments.worker_task import load

COUNTING = """
from rft_trainer.environments.protocol import Answer
MADE = []
class Counting:
    tools = [{"name": "count"}]
    def __init__(self, start=0):
        MADE.append(self)
        self.texts = []
    def reset(self, prompt, key):
        self.prompt, self.key = prompt, key
        return [f"{prompt.prompt_id} {prompt.text} {prompt.label} {key}"]
    def step(self, turn):
        self.texts.append(turn.text)
        if turn.text == "image":
            return Answer(messages=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
        said = f"{turn.finish_reason} {[(c.name, dict(c.arguments)) for c in turn.calls]} {self.texts}"
        return Answer(messages=[said], reward=len(self.texts), done=turn.text == "end", parts={"n": 1.0})
"""
PROMPT = {"prompt_id": "p1", "text": "hello", "label": "7"}


@pytest.fixture
def handler(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(COUNTING)
    return load(str(tmp_path / "own.py"), "Counting")


def made(handler: Any) -> list[Any]:
    return handler._make.__init__.__globals__["MADE"]


def reset(handler: Any, number: int = 4, first: int = 0) -> Any:
    return handler({"kind": "reset", "number": number, "first": first, "prompt": PROMPT, "key": 11})


def step(handler: Any, *texts: str, number: int = 4) -> Any:
    turns = [{"text": text, "calls": [{"name": "f", "arguments": {"x": 1}}], "finish_reason": "stop"} for text in texts]
    return handler({"kind": "step", "number": number, "prompt": PROMPT, "key": 11, "turns": turns})


def test_an_episode_is_begun_and_answers_turn_by_turn(handler: Any) -> None:
    begun = reset(handler)
    assert [message["content"] for message in begun["messages"]] == ["p1 hello 7 11"]
    assert begun["messages"][0]["role"] == "user"
    assert 0 <= begun["seconds"] < 5
    first = step(handler, "a")
    assert first["messages"][0]["content"] == "stop [('f', {'x': 1})] ['a']"
    assert (first["reward"], first["done"], first["parts"]) == (1.0, False, {"n": 1.0})
    assert 0 <= first["seconds"] < 5
    assert step(handler, "a", "b")["reward"] == 2.0
    assert len(made(handler)) == 1, "one environment all along"


def test_an_episode_that_this_process_has_not_seen_is_walked_through(handler: Any) -> None:
    assert step(handler, "a", "b", "c")["reward"] == 3.0
    assert made(handler)[0].texts == ["a", "b", "c"]
    assert made(handler)[0].prompt.label == "7"
    assert step(handler, "a", "b")["reward"] == 2.0, "another turn than the one that follows"
    assert len(made(handler)) == 2


def test_an_episode_that_has_ended_is_forgotten(handler: Any) -> None:
    reset(handler)
    assert step(handler, "end")["done"]
    step(handler, "end", "more")
    assert len(made(handler)) == 2


def test_episodes_before_the_first_that_is_open_are_forgotten(handler: Any) -> None:
    for number in (3, 4, 5):
        reset(handler, number)
    reset(handler, 6, first=4)
    for number, made_anew in ((4, 0), (5, 0), (3, 1)):
        before = len(made(handler))
        step(handler, "a", number=number)
        assert len(made(handler)) - before == made_anew, number


def test_tools_are_those_of_the_class(handler: Any, tmp_path: Path) -> None:
    assert handler({"kind": "tools"}) == {"tools": [{"name": "count"}]}
    (tmp_path / "bare.py").write_text("class A:\n def reset(self, p, k): pass\n def step(self, t): pass\n")
    assert load(str(tmp_path / "bare.py"), "A")({"kind": "tools"}) == {"tools": []}


def test_an_image_that_cannot_be_shown_is_an_answer_of_its_own(handler: Any) -> None:
    reset(handler)
    assert set(step(handler, "image")) == {"image"}


@pytest.mark.parametrize(
    ("text", "name", "code", "do"),
    [
        ("class A: pass\nclass Bb: pass\n", "B", "environment.class_missing", "own.py:Bb"),
        ("from pathlib import Path\nB = 3\n", "B", "environment.class_missing", "own.py:Environment"),
        ("class B:\n def step(self, t): pass\n", "B", "environment.class", "def reset(self, prompt, key): ..."),
        ("class B:\n def reset(self, p, k): pass\n", "B", "environment.class", "def step(self, turn): ..."),
        (
            "class B:\n def __init__(self, size): pass\n def reset(self, p, k): pass\n def step(self, t): pass\n",
            "B",
            "environment.class",
            "def __init__(self): ...",
        ),
    ],
)
def test_a_class_that_is_no_environment_is_refused(tmp_path: Path, text: str, name: str, code: str, do: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(OptionsError) as caught:
        load(str(file), name)
    assert caught.value.problem.code == code
    assert caught.value.problem.do.endswith(do)


def test_arguments_that_have_a_default_or_a_name_are_no_hindrance(tmp_path: Path) -> None:
    text = "class B:\n def __init__(self, a=1, *rest, b=2, **more): pass\n"
    (tmp_path / "own.py").write_text(text + " def reset(self, p, k): pass\n def step(self, t): pass\n")
    assert load(str(tmp_path / "own.py"), "B")({"kind": "tools"}) == {"tools": []}
