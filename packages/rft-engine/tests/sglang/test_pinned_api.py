"""The snapshot of the pinned release: signatures as Python binds them, fields by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import Parameter
from typing import Any

import pytest

from rft_engine.sglang import pinned_api
from rft_engine.sglang.pinned_api import signature, surface, unknown_fields, version


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The calls of a snapshot in the place of the release's."""
    known: dict[str, str] = {}
    snapshot: dict[str, Any] = {"version": "7.8.9", "calls": known, "fields": {"Row": {"a": "1", "b": "2"}}}
    monkeypatch.setattr(pinned_api, "surface", lambda: snapshot)
    signature.cache_clear()
    yield known
    signature.cache_clear()


def test_a_signature_has_the_kinds_and_defaults_of_the_source(calls: dict[str, str]) -> None:
    calls["C.m"] = "async (self, first, /, second, third='x', *rest, fourth, fifth=(1, 2), **others)"
    found = signature("C.m").parameters
    plain, named = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    assert {name: (one.kind, one.default) for name, one in found.items()} == {
        "self": (plain, Parameter.empty),
        "first": (plain, Parameter.empty),
        "second": (plain, Parameter.empty),
        "third": (plain, "'x'"),
        "rest": (Parameter.VAR_POSITIONAL, Parameter.empty),
        "fourth": (named, Parameter.empty),
        "fifth": (named, "(1, 2)"),
        "others": (Parameter.VAR_KEYWORD, Parameter.empty),
    }


def test_what_a_signature_lacks_is_not_in_it(calls: dict[str, str]) -> None:
    calls["C.m"] = "(self, only)"
    assert list(signature("C.m").parameters) == ["self", "only"]
    with pytest.raises(TypeError):
        signature("C.m").bind(None, 1, 2)
    with pytest.raises(TypeError):
        signature("C.m").bind(None, 1, more=2)


def test_unknown_fields_are_named_in_order(calls: dict[str, str]) -> None:
    assert unknown_fields("Row", {"z": 0, "a": 0, "c": 0}) == ["c", "z"]
    assert unknown_fields("Row", {"b": 0}) == []
    assert version() == "7.8.9"


def test_every_call_of_the_release_has_a_signature_that_begins_with_self() -> None:
    for name in surface()["calls"]:
        found = signature(name)
        assert isinstance(found, inspect.Signature)
        assert next(iter(found.parameters)) == "self", name
    assert surface() is surface(), "read from disk once"
