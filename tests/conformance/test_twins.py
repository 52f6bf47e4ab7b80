"""Cases are what their definitions make, twins agree with arithmetic by hand, and cases tell formulas apart."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from conformance import make_cases, variants
from conformance.adapters import ours
from conformance.compare import distance, flat, worst
from conformance.definitions import ALL
from conformance.twins import TWINS, computed, expected

FOLDER = Path(__file__).parent
BY_ID = {case.id: case for case in ALL}
STANDARD = {
    "__future__",
    "collections",
    "dataclasses",
    "decimal",
    "math",
    "typing",
    "conformance",
    "fractions",
    "random",
}


def test_committed_cases_are_what_their_definitions_make() -> None:
    stale = [path.name for path, text in make_cases.files().items() if path.read_text() != text]
    assert stale == [], "run: cd tests && python -m conformance.make_cases"
    assert {path.name for path in make_cases.FOLDER.iterdir()} == {path.name for path in make_cases.files()}


def test_ids_are_unique() -> None:
    assert len(BY_ID) == len(ALL)


@pytest.mark.parametrize("case", [case for case in ALL if case.hand], ids=lambda case: case.id)
def test_a_twin_agrees_with_arithmetic_by_hand(case: Any) -> None:
    found = expected(case.kind, case.name, case.inputs, case.params)
    for name, value in case.hand.items():
        assert distance(make_cases.by_hand(value), found[name]) <= 1e-15, name
    assert case.arithmetic


def test_twins_and_definitions_import_the_standard_library_alone() -> None:
    for folder in ("twins", "definitions"):
        for path in (FOLDER / folder).glob("*.py"):
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
            for node in nodes:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert {name.split(".")[0] for name in names} <= STANDARD, path
                assert not any(name.startswith("conformance.adapters") for name in names), path


def test_every_twin_has_cases_and_every_case_a_twin() -> None:
    assert {(c.kind, c.name) for c in ALL} == {(kind, name) for kind, twins in TWINS.items() for name in twins}
    assert {(c.kind, c.name) for c in ALL} == set(ours.COMPUTE)


def test_gradients_by_differences_equal_derivatives_by_hand() -> None:
    # PPO-clip: -A r / n where the clip does not act, else 0; GSPO: -A s / (L N) at every token
    case = BY_ID["surrogate/ppo_clip/moved"]
    inputs, found = case.inputs, expected("surrogate", "ppo_clip", case.inputs, case.params)
    rows = zip(inputs["logprobs"], inputs["old_logprobs"], inputs["advantages"], found["gradient"], strict=True)
    for now, old, advantages, slopes in rows:
        for n, o, a, slope in zip(now, old, advantages, slopes, strict=True):
            r = math.exp(n - o)
            free = r <= 1.2 if a > 0 else r >= 0.8
            assert slope == pytest.approx(-a * r / 12 if free else 0.0, rel=1e-13, abs=1e-30)
    case = BY_ID["surrogate/gspo/wide"]
    inputs, found = case.inputs, expected("surrogate", "gspo", case.inputs, case.params)
    rows = zip(inputs["logprobs"], inputs["old_logprobs"], inputs["advantages"], found["gradient"], strict=True)
    for now, old, advantages, slopes in rows:
        s = math.exp(sum(n - o for n, o in zip(now, old, strict=True)) / len(now))
        assert 0.5 < s < 1.5
        assert slopes == pytest.approx([-advantages[0] * s / (len(now) * 3)] * len(now), rel=1e-13)


VARIANTS = [(key, label) for key, found in variants.VARIANTS.items() for label in found]


@pytest.mark.parametrize(("key", "label"), VARIANTS, ids=lambda part: part if isinstance(part, str) else "/".join(part))
def test_some_case_tells_a_variant_from_the_paper(key: tuple[str, str], label: str) -> None:
    twin, apart = variants.VARIANTS[key][label], 0.0
    for case in ALL:
        if (case.kind, case.name) == key:
            wanted = expected(case.kind, case.name, case.inputs, case.params)
            try:
                apart = max(apart, worst(computed(twin, case.inputs, case.params), wanted))
            except (KeyError, TypeError):  # a variant may need what a case does not put in, or NaN stands there
                continue
    assert apart > variants.TOLERANCE


def changes(value: Any) -> Any:
    """The same numbers with the opposite sign."""
    return [changes(item) for item in value] if isinstance(value, list) else -value


@pytest.mark.parametrize("kind", sorted(TWINS))
def test_a_changed_sign_or_scale_is_seen(kind: str) -> None:
    for name in TWINS[kind]:
        cases = [case for case in ALL if (case.kind, case.name) == (kind, name)]
        results = [expected(kind, name, case.inputs, case.params) for case in cases]
        for key in results[0]:
            there = [found[key] for found in results if any(flat(found[key]))]
            assert there, f"{name}: {key} is 0 in every case"
            assert all(distance(changes(value), value) > 1 for value in there)
