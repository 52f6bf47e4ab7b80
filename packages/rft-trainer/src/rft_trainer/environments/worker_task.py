"""User's environment in a process that can be killed: a task of `rft_trainer.workers.main`.

Requests name an episode and hold all its turns; the process keeps the environments of open episodes, and makes one
anew, walking it through the earlier turns, where it has not seen it (another process had it and was killed).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.environments.protocol import (
    AssistantTurn,
    Environment,
    EnvironmentPrompt,
    ImageMessageError,
    ToolCall,
    as_answer,
    as_messages,
)
from rft_trainer.workers import user_file

_STATE = "no conversation was begun"


def load(path: str, name: str) -> Callable[[Mapping[str, Any]], object]:
    """Return the handler of requests for the class `name` of a file.

    Raises:
        OptionsError: no such file or class, or a class without `reset` and `step`. What the file itself raises while
            it is imported is not caught.
    """
    module = user_file.import_file(path, "--environment", "Class")
    cls = getattr(module, name, None)
    if not inspect.isclass(cls):
        raise _no_class(module, path, name)
    make: Any = cls
    lacking = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    needed = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty and p.kind < 2]
    if lacking or needed:
        raise OptionsError(
            code="environment.class",
            what=f"{path}: {name} " + (f"has no {lacking[0]}" if lacking else f"cannot be created without {needed[0]}"),
            where="--environment",
            why="an environment is created without arguments and has reset(prompt, key) and step(turn)",
            state=_STATE,
            do=f"def {lacking[0] if lacking else '__init__'}(self"
            + {"reset": ", prompt, key", "step": ", turn"}.get(lacking[0] if lacking else "", "")
            + "): ...",
        )
    return _Handler(make)


class _Handler:
    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._open: dict[int, tuple[Environment, int]] = {}
        """Environment and turns that it has answered, by the number of the episode."""

    def __call__(self, request: Mapping[str, Any]) -> object:
        try:
            return self._handle(request)
        except ImageMessageError as error:
            return {"image": str(error)}

    def _handle(self, request: Mapping[str, Any]) -> object:
        kind = request["kind"]
        if kind == "tools":
            return {"tools": list(getattr(self._make, "tools", ()))}
        number = int(request["number"])
        if kind == "reset":
            first = int(request["first"])
            # by number, however they ended: no request says that a conversation was given up
            self._open = {open_: kept for open_, kept in self._open.items() if open_ >= first}
        started = time.perf_counter()
        if kind == "reset":
            return {"messages": self._begin(request), "seconds": time.perf_counter() - started}
        turns = [_turn(row) for row in request["turns"]]
        environment = self._at(request, turns[:-1])
        answer = as_answer(environment.step(turns[-1]), turns[-1])
        # only after the step: where it raises, the episode is not counted as having this turn
        self._open[number] = environment, len(turns)
        if answer.done:
            del self._open[number]
        return {
            "messages": list(answer.messages),
            "reward": answer.reward,
            "done": answer.done,
            "parts": dict(answer.parts),
            "seconds": time.perf_counter() - started,
        }

    def _begin(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        environment = self._make()
        row = request["prompt"]
        prompt = EnvironmentPrompt(row["prompt_id"], row["text"], row["label"])
        opening = as_messages(environment.reset(prompt, int(request["key"])), "user")
        self._open[int(request["number"])] = environment, 0
        return opening

    def _at(self, request: Mapping[str, Any], before: list[AssistantTurn]) -> Environment:
        """Return the episode's environment after the turns `before`, replayed if this process does not have it."""
        number = int(request["number"])
        # the number of turns tells: another process had the episode, or this one an earlier state of it
        if number not in self._open or self._open[number][1] != len(before):
            self._begin(request)
            for turn in before:
                # the answers are dropped: they are in the conversation already
                self._open[number][0].step(turn)
        return self._open[number][0]


def _turn(row: Mapping[str, Any]) -> AssistantTurn:
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in row["calls"])
    return AssistantTurn(row["text"], calls, row["finish_reason"])


def _no_class(module: ModuleType, path: str, name: str) -> OptionsError:
    classes = [
        key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    nearest = nearest_names(name, classes, count=1, cutoff=0.0)
    return OptionsError(
        code="environment.class_missing",
        what=f"{path} has no class {name!r}; it has: {', '.join(classes) or 'none'}",
        where="--environment",
        why="an environment of your own is given as file.py:Class",
        state=_STATE,
        do=f"--environment {path}:{nearest[0] if nearest else 'Environment'}",
    )
