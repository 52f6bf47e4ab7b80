"""Reward function from a user's file; this module's `load` runs in a scoring process.

```python
def reward_fn(responses, labels):                # all responses to a prompt: one number each; None = no score
    return [float(label in response) for response, label in zip(responses, labels)]

def reward_fn(response, label, level):           # one response; `level` is a column of its row
    return float(label in response) / level
```

What its arguments may be called is in `reward_arguments`. In the place of a number there may be a mapping: its
`reward`, the `parts` it is made of by name, and `steps`, pairs of (characters of the response up to the end of the
step, its reward).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from rft_core.durable_files import kind_of
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.user_code import load_module
from rft_trainer.records.scores import FailureKind
from rft_trainer.workers.reward_arguments import STATE, facts_of
from rft_trainer.workers.reward_values import Value, WrongLength, WrongType, as_value, as_values, failure
from rft_trainer.workers.user_errors import error_line, error_place, print_traceback, user_traceback


class RewardHandler:
    """Handler of calls of a reward function with the arguments of `rewards.user_function.payload`."""

    def __init__(self, function: Callable[..., Any], path: str, name: str, *, keeps_errors: bool) -> None:
        """Read the function's signature.

        Args:
            function: of any kind that can be called.
            path: of its file, for messages.
            name: by which it was asked for.
            keeps_errors: whether what it raises for one response, and a list of another length, becomes the value of
                responses, and not an error of the call.

        Raises:
            OptionsError: a class, which makes objects and no numbers.
        """
        if inspect.isclass(function):
            raise _is_class(name, path)
        self.facts = facts_of(function, name, path)
        self._function, self._name, self._keeps_errors = function, name, keeps_errors

    @property
    def about(self) -> dict[str, Any]:
        """The facts of the function that the parent needs, as JSON."""
        return {"function": self.facts.as_json()}

    def __call__(self, payload: Mapping[str, Any]) -> list[Value]:
        """Call the function and return one value a response."""
        num_responses = int(payload["num_responses"])
        calls = [_split(values, payload["num_positional"]) for values in calls_of(payload)]
        if payload["one_at_a_time"]:
            return self._one_at_a_time(calls)
        try:
            [(positional, named)] = calls
            values = as_values(self._finished(self._function(*positional, **named)), num_responses, self._name)
        except (WrongLength, WrongType) as error:
            if not self._keeps_errors:
                raise
            values = [failure(error.kind, str(error)) for _ in range(num_responses)]
        return [self._placed(value) for value in values]

    def _one_at_a_time(self, calls: Sequence[tuple[list[Any], dict[str, Any]]]) -> list[Value]:
        begun: list[Any] = []
        failed: dict[int, Value] = {}
        for index, (positional, named) in enumerate(calls):
            try:
                begun.append(self._function(*positional, **named))
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises for one response
                failed[index] = self._kept(error)
                begun.append(None)
        waiting = [index for index, value in enumerate(begun) if inspect.isawaitable(value)]
        # all of them beside one another: they wait for a server
        for index, value in zip(waiting, _awaited([begun[index] for index in waiting]), strict=True):
            begun[index] = value
            if isinstance(value, BaseException):
                failed[index] = self._kept(value)
        return [
            failed[index] if index in failed else self._placed(as_value(value, self._name))
            for index, value in enumerate(begun)
        ]

    def _placed(self, value: Value) -> Value:
        """Return a failure with the place of the function."""
        return {**value, "place": self.facts.place} if isinstance(value, dict) and "failure" in value else value

    def _kept(self, error: BaseException) -> Value:
        """Return the value of a response for which the function raised; raise what is no matter of one response."""
        if not self._keeps_errors or isinstance(error, MemoryError) or not isinstance(error, Exception):
            raise error
        print_traceback(error)  # to the log of the run
        place, trace = error_place(error), user_traceback(error)
        return failure(FailureKind.EXCEPTION, error_line(error), place=place, traceback=trace)

    def _finished(self, value: Any) -> Any:
        """Return the result of a coroutine, or the value itself."""
        if not inspect.isawaitable(value):
            return value
        [result] = _awaited([value])
        if isinstance(result, BaseException):
            raise result
        return result


def calls_of(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call in order: one of lists, or one a response; all of them the function's own."""
    lists: Mapping[str, Sequence[Any]] = payload["lists"]
    shared: Mapping[str, Any] = payload["shared"]
    num = int(payload["num_responses"])

    def value(name: str, index: int) -> Any:
        # of its own: a function may sort or pop what it is given
        return copy.deepcopy(shared[name] if name in shared else lists[name][index])

    if payload["one_at_a_time"]:
        yield from ({name: value(name, index) for name in payload["order"]} for index in range(num))
    else:
        yield {name: [value(name, index) for index in range(num)] for name in payload["order"]}


def _split(values: Mapping[str, Any], num_positional: int) -> tuple[list[Any], dict[str, Any]]:
    names = list(values)
    return [values[name] for name in names[:num_positional]], {name: values[name] for name in names[num_positional:]}


def _awaited(values: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait for all of them beside one another; what one raised stands in its place."""
    if not values:
        return []

    async def together() -> list[Any]:
        return list(await asyncio.gather(*values, return_exceptions=True))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    # a notebook has a loop of its own in this thread
    with ThreadPoolExecutor(1, "reward") as thread:
        return thread.submit(asyncio.run, together()).result()


def load(path: str, function: str) -> RewardHandler:
    """Load the function of a file and return its handler.

    Raises:
        OptionsError: no such file or function. What the file
            itself raises while it is imported is not caught; the pool makes a `DataError` of it.
    """
    return RewardHandler(function_of(import_file(path), path, function), path, function, keeps_errors=True)


def function_of(module: ModuleType, path: str, function: str) -> Callable[..., Any]:
    """Return what can be called under a name of a module.

    Raises:
        OptionsError: there is none.
    """
    target = getattr(module, function, None)
    if not callable(target):
        raise _no_function(module, path, function)
    return target


def import_file(path: str, flag: str = "--reward", example: str = "reward_fn") -> ModuleType:
    """Import a Python file as a module; `flag` and `example` (a name in it) are for messages.

    Raises:
        OptionsError: there is no such file, or it is not Python.
    """
    file, kind = Path(path), flag.removeprefix("--")
    if not file.is_file():
        found = "does not exist" if kind_of(file) == "not there" else f"is {kind_of(file)}"
        raise OptionsError(
            code=f"{kind}.file_missing",
            what=f"{kind} file {path} {found} (looked in {Path.cwd()})",
            where=flag,
            why=f"your own {kind} is given as file.py:{example}",
            state=STATE,
            do=f"{flag} {Path(path).name}:{example}, from the directory that holds the file",
        )
    if file.suffix != ".py":
        raise OptionsError(
            code=f"{kind}.not_python",
            what=f"{kind} file {path} is not a Python file",
            where=flag,
            why="the file is imported, so its name must end in .py",
            state=STATE,
            do=f"{flag} {file.with_suffix('.py')}:{example}",
        )
    return load_module(file, f"rft_user_{kind}", with_neighbours=True)


def _no_function(module: ModuleType, path: str, function: str) -> OptionsError:
    functions = [name for name, value in vars(module).items() if _is_reward(value) and name[0] != "_"]
    nearest = nearest_names(function, functions, count=1, cutoff=0.0)
    return OptionsError(
        code="reward.function_missing",
        what=f"{path} has no function {function!r}; it has: {', '.join(functions) or 'none'}",
        where="--reward",
        why="a reward of your own is given as file.py:function",
        state=STATE,
        do=f"--reward {path}:{nearest[0] if nearest else 'reward_fn'}",
    )


def _is_reward(value: object) -> bool:
    """Return whether a value of a module may be a reward: a function, or an object of its own that can be called."""
    return inspect.isfunction(value) or (
        callable(value) and not inspect.isclass(value) and not inspect.isroutine(value)
    )


def _is_class(name: str, path: str) -> OptionsError:
    return OptionsError(
        code="reward.is_class",
        what=f"{path}: {name} is a class, and a call of it makes an object",
        where="--reward",
        why="a reward is a function, or an object that can be called",
        state=STATE,
        do=f"{name.lower()}_reward = {name}() in {path}, and --reward {path}:{name.lower()}_reward",
    )
