"""A response that is JSON, and of a schema. Parsers and the schema's patterns run in a process.

The schema is checked with the package jsonschema, an extra. Nothing is fetched: a reference to another document is
refused, and the registry of the validator is empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError, OptionsError, install_command
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.rules.final_answer import final_answer
from rft_trainer.rewards.rules.pooled import PooledReward
from rft_trainer.rewards.rules.table import RuleContext

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_VALUES = ("const", "enum", "default", "examples")
_FENCE = re.compile(r"```(?:json)?[ \t]{0,8}\n")


def build(context: RuleContext) -> PooledReward:
    """Return the rule: 1 where the response is JSON and meets the schema, else 0. Parts: `json` and `schema`.

    Raises:
        DataError: the file of the schema is not there, or no schema.
        OptionsError: the package jsonschema is missing, or the schema refers to another document.
    """
    path = context.options["json_schema"]
    schema = read_schema(Path(path).expanduser()) if path else ""

    def payload(item: RewardItem) -> Mapping[str, object]:
        return {"response": item.response_text, "schema": schema}

    return PooledReward("json_schema", payload, context)


def judge(payload: Mapping[str, Any]) -> dict[str, float]:
    """Return value and parts for {"response": str, "schema": str}; an empty schema allows every value."""
    try:
        value = json.loads(json_text(payload["response"]), parse_constant=_no_constant)
    except (ValueError, RecursionError):  # what is nested deeper than Python reads is no JSON here
        return {"reward": 0.0, "json": 0.0, "schema": 0.0}
    fits = float(not payload["schema"] or bool(_validator(payload["schema"]).is_valid(value)))
    return {"reward": fits, "json": 1.0, "schema": fits}


def json_text(response: str) -> str:
    """Return what is read as JSON: the last fenced block, else the marked answer, else the whole response."""
    fences = [match.end() for match in _FENCE.finditer(response)]
    for start in reversed(fences):
        end = response.find("```", start)
        if end >= 0:
            return response[start:end]
    inside = final_answer(response) if "<answer>" in response else None
    return response if inside is None else inside


def read_schema(path: Path) -> str:
    """Return the text of a schema that can be used without another document.

    Raises:
        DataError: no such file, no JSON, or no schema.
        OptionsError: jsonschema is missing, or a reference leaves the document.
    """
    try:
        text = path.read_text(encoding="utf-8")
        schema = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _no_schema(path, f"cannot be read as JSON: {error}") from error
    outside = next((found for found in _references(schema) if not found.startswith("#")), None)
    if outside is not None:
        raise OptionsError(
            code="reward.schema_reference",
            what=f"{path} refers to {outside}",
            where="--json_schema",
            why="a schema is used alone: no other document is fetched or opened",
            state="nothing was started",
            do=f'put it under "$defs" of {path}, and refer to it as #/$defs/NAME',
        )
    fault = _fault_of(schema)
    if fault:
        raise _no_schema(path, fault)
    return text


@lru_cache(maxsize=4)
def _validator(text: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(text)
    # an empty registry: without one, jsonschema would fetch what a schema refers to
    return validator_for(schema)(schema, registry=Registry())


def _fault_of(schema: Any) -> str:
    """Return what is wrong with a schema; empty where nothing is."""
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise OptionsError(
            code="reward.no_jsonschema",
            what="json_schema is given, and the package jsonschema is not installed",
            where="--json_schema",
            why="values are compared with a schema by jsonschema; without a schema the rule needs no package",
            state="nothing was started",
            do=install_command("json-schema"),
        ) from error
    if not isinstance(schema, dict):
        return "a schema is an object"
    known = cast("dict[str, Any]", schema)
    try:
        validator_for(known).check_schema(known)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    return ""


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in cast("list[Any]", value):
            yield from _references(entry)
    elif isinstance(value, dict):
        for name, entry in cast("dict[str, Any]", value).items():
            if name in _REFERENCES and isinstance(entry, str):
                yield entry
            # values of the data, in which a reference is a text like any other
            elif name not in _VALUES:
                yield from _references(entry)


def _no_schema(path: Path, fault: str) -> DataError:
    return DataError(
        code="reward.schema",
        what=f"{path} is no schema: {fault}",
        where="--json_schema",
        why="the file holds a JSON schema (https://json-schema.org)",
        do=f"correct {path}",
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
