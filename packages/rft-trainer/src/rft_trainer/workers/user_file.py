"""Reward function from a user's file; this module's `load` runs in a scoring process.

```python
def reward_fn(responses, labels):                # one float a response; None = no score
    return [float(label in response) for response, label in zip(responses, labels)]

def reward_fn(responses, labels, *, prompts):    # any of the extras by name
    ...
```

In the place of a number there may be a mapping: its `reward`, the `parts` it is made of by name, and
`steps`, pairs of (characters of the response up to the end of the step, its reward).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rft_core.durable_files import kind_of
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.user_code import load_module

EXTRAS = ("prompts", "prompt_ids", "finish_reasons", "num_tokens", "images")
"""Keyword-only parameters that a reward function may ask for: lists, one entry a response. That of `images` is a list
of paths, with a data URI where an image stood in the data itself; empty without images."""

_STATE = "no response was scored and nothing was started"


def load(path: str, function: str) -> Callable[[Mapping[str, object]], object]:
    """Load and check the function; return its handler of {"responses", "labels", *EXTRAS} -> list of numbers.

    Raises:
        OptionsError: no such file or function, or a signature that cannot be called. What the file
            itself raises while it is imported is not caught; the pool makes a `DataError` of it.
    """
    module = import_file(path)
    target = getattr(module, function, None)
    if not callable(target):
        raise _no_function(module, path, function)
    return handler_of(target, path, function)


def handler_of(reward: Callable[..., Any], path: str, function: str) -> Callable[[Mapping[str, object]], object]:
    """Wrap a function of `path`, called `function` there, as the handler of `load`.

    Raises:
        OptionsError: a signature that cannot be called.
    """
    extras = _extras(reward, path, function)

    def handle(payload: Mapping[str, object]) -> object:
        responses = payload["responses"]
        assert isinstance(responses, list)
        # lists of its own: a function may sort or pop what it is given
        extra_values = {name: copy.copy(payload[name]) for name in extras}
        if "images" in extra_values:  # one list travels for all responses to a prompt
            extra_values["images"] = [copy.copy(payload["images"]) for _ in responses]
        values = reward(list(responses), copy.copy(payload["labels"]), **extra_values)
        return _as_numbers(values, len(responses), function)

    return handle


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
            state=_STATE,
            do=f"{flag} {Path(path).name}:{example}, from the directory that holds the file",
        )
    if file.suffix != ".py":
        raise OptionsError(
            code=f"{kind}.not_python",
            what=f"{kind} file {path} is not a Python file",
            where=flag,
            why="the file is imported, so its name must end in .py",
            state=_STATE,
            do=f"{flag} {file.with_suffix('.py')}:{example}",
        )
    return load_module(file, f"rft_user_{kind}", with_neighbours=True)


def _no_function(module: ModuleType, path: str, function: str) -> OptionsError:
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
    nearest = nearest_names(function, functions, count=1, cutoff=0.0)
    return OptionsError(
        code="reward.function_missing",
        what=f"{path} has no function {function!r}; it has: {', '.join(functions) or 'none'}",
        where="--reward",
        why="a reward of your own is given as file.py:function",
        state=_STATE,
        do=f"--reward {path}:{nearest[0] if nearest else 'reward_fn'}",
    )


def _extras(reward: Callable[..., object], path: str, function: str) -> tuple[str, ...]:
    """Return the names of the extras that the function takes; `OptionsError` where it cannot be called."""
    parameters = inspect.signature(reward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in EXTRAS]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    num_required = sum(p.default is p.empty for p in positional)
    takes_two = num_required <= 2 and (len(positional) >= 2 or takes_any)
    if unknown or not takes_two or inspect.iscoroutinefunction(reward):
        kind = "async def" if inspect.iscoroutinefunction(reward) else "def"
        written = f"{kind} {function}{inspect.signature(reward)}"
        raise OptionsError(
            code="reward.signature",
            what=f"{path}: {written} cannot be called as {function}(responses, labels)",
            where="--reward",
            why=f"it is called with two lists by position; after * it may ask for {', '.join(EXTRAS)} by name",
            state=_STATE,
            do=f"def {function}(responses, labels) -> list[float]",
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return EXTRAS
    return tuple(name for name in names if name in EXTRAS)


def _as_numbers(values: object, num_responses: int, function: str) -> list[float | str | dict[str, object]]:
    """Convert to numbers, with parts and steps where given; a value that is not finite becomes a text with it."""
    to_list = getattr(values, "tolist", None)  # numpy and torch
    listed = to_list() if callable(to_list) else values
    if not isinstance(listed, list | tuple):
        raise TypeError(f"{function} returned {type(values).__name__}, expected a list of {num_responses} numbers")
    # never paired up as far as it goes: a missing value would shift the rewards of the others
    if len(listed) != num_responses:
        raise ValueError(f"{function} returned {len(listed)} values for {num_responses} responses")
    return [_with_parts(value) if isinstance(value, dict) else _as_number(value) for value in listed]


def _with_parts(value: dict[str, Any]) -> str | dict[str, object]:
    unknown = sorted(set(value) - {"reward", "parts", "steps"})
    if unknown or "reward" not in value:
        return f"the reward function returned a mapping with {sorted(value)}; its keys may be reward, parts, steps"
    reward = _as_number(value["reward"])
    parts = {str(name): _as_number(part) for name, part in value.get("parts", {}).items()}
    steps = [(_as_number(end), _as_number(step)) for end, step in value.get("steps", [])]
    numbers = [reward, *parts.values(), *(number for step in steps for number in step)]
    # one bad number spoils the score: a sum without it would be another reward
    wrong = next((number for number in numbers if isinstance(number, str)), None)
    return wrong if wrong is not None else {"reward": reward, "parts": parts, "steps": steps}


def _as_number(value: object) -> float | str:
    item = getattr(value, "item", None)  # a number of numpy or torch
    number = item() if callable(item) else value
    if isinstance(number, int | float) and math.isfinite(number):
        return float(number)
    return f"the reward function returned {str(value)[:100]!r}"
