"""Arguments of the library's functions under their names in other trainers: answered with the name that they have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from rft.config.commands import SFT
from rft.config.other_names import named_elsewhere
from rft_core.errors import OptionsError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_TRAINING = {"model": "pretrain", "data": "prompt_data", "eval_data": "eval_data", "tokenizer": "processing_class"}
"""Arguments, each with the setting, or the name elsewhere, that other programs have for it."""
_EVALUATION = {"model": "pretrain", "data": "eval_data", "tokenizer": "processing_class"}
_GENERATION = {"model": "pretrain", "prompts": "prompt_data", "tokenizer": "processing_class"}
_PROMPT = "prompt"
"""A text to answer on the command line, where `prompts` are texts or the `Path` of a file."""
_EXAMPLES = {
    "pretrain": 'pretrain="Qwen/Qwen3-0.6B"',
    "model": 'model="Qwen/Qwen3-0.6B"',
    "data": 'data=[{"input": "2+3=", "label": "5"}]',
    "prompts": 'prompts=["2+3="]',
}


def training_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a function that trains: rows that another trainer calls train_dataset are its `data`."""
    return _answering(function, _TRAINING)


def evaluation_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a function that scores: its rows are held out."""
    return _answering(function, _EVALUATION)


def generation_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a function that answers prompts."""
    return _answering(function, _GENERATION)


def loop_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of `open_loop`, whose model is called as the setting is."""
    return _answering(function, {"pretrain": "model"})


def _answering(function: Callable[Parameters, Result], meanings: Mapping[str, str]) -> Callable[Parameters, Result]:
    """Return `function` with an error of ours where Python would say that a positional argument is missing.

    Raises:
        OptionsError: at the call: an argument without a default is missing, or an object has another trainer's name.
    """
    parameters = inspect.signature(function).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        _refuse_objects(function.__name__, kwargs)
        given = {*positional[: len(args)], *kwargs}
        others = {name: value for name, value in kwargs.items() if name not in parameters}
        for argument, meaning in meanings.items():
            if argument in given:
                continue
            is_required = argument in required
            for written, value in others.items():
                # a text is a setting like any other, whose problems are reported with all others
                if _means(written, argument, meaning) and (is_required or not isinstance(value, str)):
                    raise _called(function.__name__, argument, written, value)
            if is_required:
                raise _missing(function.__name__, argument)
        return function(*args, **kwargs)

    return call


def _refuse_objects(function: str, given: Mapping[str, object]) -> None:
    """Refuse objects that hold settings in other libraries: here each setting is a keyword."""
    if "peft_config" in given:
        rank = getattr(given["peft_config"], "r", 8)
        raise _settings_object(function, "peft_config", f"lora_rank={rank}")
    if "args" in given and not isinstance(given["args"], str):
        rate = getattr(given["args"], "learning_rate", 1e-6)
        name = "learning_rate" if function == SFT.name else "actor_learning_rate"
        raise _settings_object(function, "args", f"{name}={rate}")


def _settings_object(function: str, name: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.settings_object",
        what=f"rft.{function} was given {name}, an object of settings",
        where="keyword argument",
        why="every setting is a keyword of its own, by the name of its flag; names of other trainers are answered",
        state="nothing was started",
        do=do,
    )


def _means(written: str, argument: str, meaning: str) -> bool:
    if argument == "prompts" and written == _PROMPT:
        return True
    return written == meaning or {argument, meaning} & {*named_elsewhere(written)} != set()


def _called(function: str, argument: str, written: str, value: object) -> OptionsError:
    text = f"pathlib.Path({value!r})" if argument == "prompts" and written != _PROMPT else repr(value)
    return OptionsError(
        code="library.argument_name",
        what=f"rft.{function} was given {written}",
        where="keyword argument",
        why=f"it is called {argument} here",
        state="nothing was started",
        do=f"{argument}={text}" if isinstance(value, str) else f"write {argument}= in place of {written}=",
    )


def _missing(function: str, argument: str) -> OptionsError:
    return OptionsError(
        code="library.argument_missing",
        what=f"rft.{function} was given no {argument}",
        where=f"argument {argument}",
        why="it has no default",
        state="nothing was started",
        do=_EXAMPLES[argument],
    )
