"""Arguments of a reward function, bound by their names to what is known of a response and to the columns of its row.

One name decides how often the function is called: `responses` or `completions` stand for all responses to a prompt,
`response`, `completion` or `solution_str` for one of them. All other names mean the same in both cases: a list with
one entry a response in the first, one value in the second.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

ALL_RESPONSES = ("responses", "completions")
ONE_RESPONSE = ("response", "completion", "solution_str")
_LABEL_OR_COLUMN = ("label", "answer", "ground_truth")
"""The label, unless the data have a column of this name."""
SINGULAR = {
    "prompts": "prompt",
    "labels": "label",
    "prompt_ids": "prompt_id",
    "finish_reasons": "finish_reason",
    "num_tokens": "num_tokens",
    "images": "images",
}
"""What is known of a response, and its name where one response is scored at a time."""
KNOWN = tuple(SINGULAR)
_SOURCES = {singular: plural for plural, singular in SINGULAR.items()}
_DEFAULTS = ("data_source", "extra_info")
"""Arguments of verl's functions that rows need not have: then the name of the source, and an empty mapping."""

STATE = "no response was scored and nothing was started"

COLUMN = "column:"
"""Prefix of a column as the source of an argument."""

Kind = Literal["positional", "either", "keyword", "rest", "rest_by_name"]
_KINDS: Mapping[Any, Kind] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.VAR_KEYWORD: "rest_by_name",
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of a function."""

    name: str
    kind: Kind
    required: bool


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """A function as it is written, where it stands, and its parameters: plain data."""

    name: str
    written: str
    place: str
    """file:line of its definition."""
    arguments: tuple[Argument, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FunctionFacts:
        """Build the facts from their JSON."""
        arguments = tuple(Argument(**argument) for argument in fields["arguments"])
        return cls(fields["name"], fields["written"], fields["place"], arguments)


@dataclass(frozen=True, slots=True)
class Binding:
    """The source of each argument of a function."""

    sources: Mapping[str, str]
    """By argument, in order: a name of `KNOWN`, "responses", "data_source", "extra_info", or a column behind
    `COLUMN`."""
    one_at_a_time: bool
    takes_rest: bool
    """Whether it takes all other columns by name, and what else is known of the responses."""
    num_positional: int = 0
    """How many of the first arguments are given by position; those of *args are called *0 and *1."""


def facts_of(function: Callable[..., Any], name: str, path: str) -> FunctionFacts:
    """Return the facts of a function that is called `name` in `path`."""
    code = _code_of(function)
    signature = _signature(function)
    kind = "async def" if inspect.iscoroutinefunction(code) else "def"
    arguments = tuple(
        Argument(p.name, _KINDS[p.kind], p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        for p in signature.parameters.values()
    )
    return FunctionFacts(name, f"{kind} {name}{signature}", place_of(function, path), arguments)


def place_of(function: Callable[..., Any], path: str) -> str:
    """Return file:line of the function's definition, or `path` where that cannot be seen."""
    code = getattr(_code_of(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else path


def _code_of(function: Callable[..., Any]) -> Any:
    """Return the function that a partial, a decorated one or an object that is called stands for."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        elif not inspect.isroutine(function) and not inspect.isclass(function):
            called = type(function).__call__
            return inspect.unwrap(called)
        else:
            return function


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that a decorator shows, unless the decorator itself takes other names."""
    shown, own = inspect.signature(function), inspect.signature(function, follow_wrapped=False)
    named = {p.name for p in own.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in own.parameters.values())
    return shown if takes_any or set(shown.parameters) <= named else own


def bind(facts: FunctionFacts, columns: Mapping[str, str] | None) -> Binding:
    """Bind the arguments of a function.

    Args:
        facts: of the function.
        columns: those of the data, each with a row that lacks it, or ""; None = not known yet, so that any name may
            be one.

    Raises:
        OptionsError: an argument that cannot be bound, or names that do not say what the function is given.
    """
    names = [argument.name for argument in facts.arguments if argument.kind not in ("rest", "rest_by_name")]
    takes_rest = any(argument.kind == "rest_by_name" for argument in facts.arguments)
    several = [name for name in names if name in ALL_RESPONSES]
    # beside `responses`, a column of the name `response` is that of the data
    single = [name for name in names if name in ONE_RESPONSE and not (several and name in (columns or ()))]
    if len([*several, *single]) > 1:
        raise _refused(facts, columns, f"{_listed([*several, *single])} are two names of the response")
    if several or single:
        given, num_positional = {(several or single)[0]: "responses"}, 0
    elif _finds_response_by_name(facts, columns):
        given, num_positional = {}, 0  # it finds them under their names in what it takes
    else:
        given = _by_position(facts, columns)
        num_positional = len(given)
    of_several = [name for name in names if name in SINGULAR and SINGULAR[name] != name]
    if single and of_several:
        few = len(of_several) == 1
        what = f"{single[0]} is one response, {_listed(of_several)} {'is' if few else 'are'} of several"
        raise _refused(facts, columns, what)
    sources = dict(given)
    for argument in facts.arguments:
        if argument.kind in ("rest", "rest_by_name") or argument.name in sources:
            continue
        source = _source(argument, columns)
        if source is not None:
            _require_whole(facts, argument, source, columns)
            sources[argument.name] = source
        elif argument.required:
            raise _unknown(facts, argument.name, columns)
    if not num_positional:
        order = [argument.name for argument in facts.arguments if argument.name in sources]
        sources = {name: sources[name] for name in order}
        num_positional = sum(a.kind == "positional" for a in facts.arguments if a.name in sources)
    return Binding(sources, bool(single), takes_rest, num_positional)


def _finds_response_by_name(facts: FunctionFacts, columns: Mapping[str, str] | None) -> bool:
    """Return whether a function has **arguments, and none that only its position could explain."""
    kinds = [argument.kind for argument in facts.arguments]
    num_free = sum(_is_free(argument, columns) for argument in facts.arguments)
    if "rest_by_name" not in kinds or "rest" in kinds:
        return False
    # any name may be a column while the data are not known; two of them are responses and labels
    return num_free == 0 or (columns is None and num_free != 2)


def _is_free(argument: Argument, columns: Mapping[str, str] | None) -> bool:
    """Return whether the name of a required argument stands for nothing."""
    is_named = argument.kind not in ("rest", "rest_by_name")
    return is_named and argument.required and _source(argument, columns or {}) is None


def _by_position(facts: FunctionFacts, columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return the sources of a function that is given responses and labels by position.

    Neither name may stand for something else; the second may be one of the label.
    """
    places = [argument for argument in facts.arguments if argument.kind in ("positional", "either")]
    takes_more = any(argument.kind == "rest" for argument in facts.arguments)
    hides_names = takes_more and not places and any(a.kind == "rest_by_name" for a in facts.arguments)
    if hides_names:
        raise _refused(
            facts, columns, "it hides the names of its arguments", "@functools.wraps(f) on what decorates it"
        )
    if (len(places) < 2 and not takes_more) or sum(argument.required for argument in places) > 2:
        raise _refused(facts, columns, "none of its arguments is a name of the response")
    first, second = ([argument.name for argument in places] + ["*0", "*1"])[:2]
    if _is_known(first, columns) or (_is_known(second, columns) and second not in ("labels", *_LABEL_OR_COLUMN)):
        raise _refused(facts, columns, "none of its arguments is a name of the response")
    return {first: "responses", second: "labels"}


def _is_known(name: str, columns: Mapping[str, str] | None) -> bool:
    return name in (*KNOWN, *_SOURCES, *_LABEL_OR_COLUMN, *_DEFAULTS) or name in (columns or ())


def _source(argument: Argument, columns: Mapping[str, str] | None) -> str | None:
    """Return the source of an argument that is not the response; None where its name stands for nothing."""
    name = argument.name
    if name in KNOWN or (name in _SOURCES and name not in _LABEL_OR_COLUMN):
        return _SOURCES.get(name, name)
    if name in (columns or ()):
        return COLUMN + name
    if name in _LABEL_OR_COLUMN:
        return "labels"
    if not argument.required:
        return None
    if name in _DEFAULTS:
        return name
    return COLUMN + name if columns is None else None


def _require_whole(facts: FunctionFacts, argument: Argument, source: str, columns: Mapping[str, str] | None) -> None:
    """Refuse a required argument whose column some rows lack."""
    lacking = (columns or {}).get(source.removeprefix(COLUMN), "") if source.startswith(COLUMN) else ""
    if lacking and argument.required:
        raise OptionsError(
            code="reward.column_of_some",
            what=f"{facts.written} takes the column {argument.name}, which row {lacking} does not have",
            where=facts.place,
            why="a required argument needs a value in every row",
            state=STATE,
            do=f"{argument.name}=None in the function, which such a row then gives",
        )


def _unknown(facts: FunctionFacts, name: str, columns: Mapping[str, str] | None) -> OptionsError:
    near = nearest_names(name, [*ALL_RESPONSES, *ONE_RESPONSE, *_names(), *(columns or ())], count=1, cutoff=0.7)
    return OptionsError(
        code="reward.signature",
        what=f"{facts.written}: its argument {name} is neither a name of what is known of a response nor a column",
        where=facts.place,
        why=f"{_RULE}; {_columns(columns)}",
        state=STATE,
        do=f"{near[0]} in the place of {name}" if near else f"a default value for {name}, or a column of this name",
    )


def _refused(facts: FunctionFacts, columns: Mapping[str, str] | None, what: str, remedy: str = "") -> OptionsError:
    return OptionsError(
        code="reward.signature",
        what=f"{facts.written}: {what}",
        where=facts.place,
        why=f"{_RULE}; {_columns(columns)}",
        state=STATE,
        do=remedy or f"def {facts.name}(responses, labels) -> list[float]",
    )


def _names() -> list[str]:
    return list(dict.fromkeys([*KNOWN, *_SOURCES, *_LABEL_OR_COLUMN]))


_RULE = (
    f"the response is called {' or '.join(ALL_RESPONSES)} (all responses to a prompt) or "
    f"{', '.join(ONE_RESPONSE)} (one of them); other arguments are {', '.join(_names())} or columns"
)


def _columns(columns: Mapping[str, str] | None) -> str:
    return (
        f"columns of the data: {', '.join(columns) or 'none'}" if columns is not None else "columns are not known yet"
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
