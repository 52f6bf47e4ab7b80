"""Unit tests of a row: read from the forms in which data sets publish them, and compared outside of the cage.

No test is run as code of the data. An `assert` is parsed, and one that is no comparison of a call with a literal is
refused: run inside the cage, it would be judged by the program that it judges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_trainer.rewards.unit_tests.code_asserts import AssertedCall, CodeTestError, asserted_calls
from rft_trainer.sandbox.cage_main import encode
from rft_trainer.sandbox.values import Closeness, Encoded, MalformedValueError, equal, truth

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what goes into the cage, and what has to come out of it."""

    request: Mapping[str, Any]
    """{"call": name, "args": [...], "kwargs": [[name, value], ...]} or {"stdin": text}."""
    expected: tuple[Encoded, ...] = ()
    """Results any of which is right; empty for a program that prints, or where the truth of the result counts."""
    printed: str | None = None
    truth: bool | None = None
    closeness: Closeness = field(default_factory=Closeness)
    sequences_alike: bool = False

    def failure(self, reply: Mapping[str, Any] | None) -> str:
        """Return why the test failed; empty where it passed.

        Args:
            reply: of the cage, whatever it holds; None where there is none.
        """
        if reply is None:
            return "no result"
        if "error" in reply:
            return str(reply["error"])[:_SHOWN]
        if self.printed is not None:
            output = reply.get("printed")
            return (
                "" if isinstance(output, str) and _lines(output) == _lines(self.printed) else "printed something else"
            )
        try:
            return "" if self._passes(reply.get("value", ())) else "returned something else"
        except (MalformedValueError, RecursionError):
            return "returned nothing that can be read"

    def _passes(self, value: Encoded) -> bool:
        if self.truth is not None:
            return truth(value) is self.truth
        return any(
            equal(value, each, closeness=self.closeness, sequences_alike=self.sequences_alike) for each in self.expected
        )


def read_tests(label: Any, entry_point: str = "") -> tuple[CodeTest, ...]:
    """Read the tests of a row.

    Args:
        label: a list of {"call", "args", "kwargs", "expected"} and {"stdin", "stdout"}; one mapping {"inputs",
            "outputs", "fn_name"}; a list of texts `assert f(...) == ...`; the JSON text of one of these; or Python
            text of asserts.
        entry_point: the function that a text with `def check(candidate)` is about.

    Raises:
        CodeTestError: the tests cannot be read, with the number of the test and the reason.
    """
    if isinstance(label, str):
        found = _json(label)
        return _of_asserts([label], entry_point) if found is None else read_tests(found, entry_point)
    if isinstance(label, Mapping) and "inputs" in label:
        return _of_lists(label)
    if not isinstance(label, list) or not label:
        raise CodeTestError("there are no tests: a list of them is wanted, or inputs and outputs")
    if all(isinstance(each, str) for each in label):
        return _of_asserts(label, entry_point)
    return tuple(_of_record(each, f"test {index + 1}") for index, each in enumerate(label))


def tests_of(label: Any, columns: Mapping[str, Any]) -> tuple[CodeTest, ...]:
    """Read the tests of a row, with the name of its function where it has the column; raises as `read_tests`."""
    return read_tests(label, str(columns.get("entry_point") or ""))


def label_problem(label: Any, columns: Mapping[str, Any]) -> str:
    """Return why the tests of a row cannot be read; empty where they can."""
    try:
        tests_of(label, columns)
    except CodeTestError as error:
        return str(error)
    return ""


def _json(text: str) -> Any:
    """Return what a JSON text holds; None where it is none."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodeTestError(f"no JSON: {error}") from error


def _of_asserts(texts: Sequence[str], entry_point: str) -> tuple[CodeTest, ...]:
    found = [call for text in texts for call in asserted_calls(text, entry_point)]
    if not found:
        raise CodeTestError("the text holds no assert")
    return tuple(_of_call(call, f"test {index + 1}") for index, call in enumerate(found))


def _of_call(call: AssertedCall, where: str) -> CodeTest:
    request = _request(call.name, call.args, call.kwargs, where)
    if call.truth is not None:
        return CodeTest(request, truth=call.truth)
    return CodeTest(request, (_encoded(call.expected, where),), closeness=call.closeness)


def _of_record(record: Any, where: str) -> CodeTest:
    if not isinstance(record, Mapping):
        raise CodeTestError(f"{where}: {type(record).__name__} in the place of a mapping")
    keys = set(record)
    if keys == {"stdin", "stdout"}:
        return _program(record["stdin"], record["stdout"], where)
    if not {"call", "expected"} <= keys <= {"call", "args", "kwargs", "expected"}:
        wanted = "call, args, kwargs and expected, or stdin and stdout"
        raise CodeTestError(f"{where}: it has {', '.join(map(str, record)) or 'no fields'}; a test has {wanted}")
    args, kwargs = record.get("args", []), record.get("kwargs", {})
    if not isinstance(record["call"], str) or not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise CodeTestError(f"{where}: call is a name, args a list, kwargs a mapping")
    expected = (_encoded(record["expected"], where),)
    return CodeTest(_request(record["call"], args, kwargs, where), expected, sequences_alike=True)


def _of_lists(label: Mapping[str, Any]) -> tuple[CodeTest, ...]:
    """Read {"inputs": [...], "outputs": [...], "fn_name": name}, as APPS, TACO and verl's prime_code have them."""
    inputs, outputs, name = label["inputs"], label.get("outputs"), label.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise CodeTestError("inputs and outputs are lists of the same length, which is 1 or more")
    pairs = [(f"test {index + 1}", *pair) for index, pair in enumerate(zip(inputs, outputs, strict=True))]
    if not name:
        return tuple(_program(given, wanted, where) for where, given, wanted in pairs)
    return tuple(_function(str(name), given, wanted, where) for where, given, wanted in pairs)


def _function(name: str, given: Any, wanted: Any, where: str) -> CodeTest:
    if isinstance(given, str):  # the arguments as JSON, one a line
        given = [_argument(line, where) for line in given.splitlines() if line.strip()]
        wanted = _argument(wanted, where) if isinstance(wanted, str) else wanted
    if not isinstance(given, list):
        raise CodeTestError(f"{where}: the arguments of {name} are no list")
    # these data sets write a result as itself, or as a list that holds it alone
    results = [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]
    expected = tuple(_encoded(each, where) for each in results)
    return CodeTest(_request(name, given, {}, where), expected, sequences_alike=True)


def _argument(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CodeTestError(f"{where}: {line[:_SHOWN]!r} is no JSON value") from error


def _program(given: Any, wanted: Any, where: str) -> CodeTest:
    texts = ["\n".join(each) if _is_lines(each) else each for each in (given, wanted)]
    if not all(isinstance(each, str) for each in texts):
        raise CodeTestError(f"{where}: input and output of a program are texts")
    return CodeTest({"stdin": texts[0]}, printed=texts[1])


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _request(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = [[key, _encoded(value, where)] for key, value in kwargs.items()]
    return {"call": name, "args": [_encoded(value, where) for value in args], "kwargs": given}


def _encoded(value: Any, where: str) -> Encoded:
    try:
        return encode(value)
    except TypeError as error:
        raise CodeTestError(f"{where}: {error} cannot go into the sandbox") from error


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
