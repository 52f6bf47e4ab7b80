"""Results of all trainers on all cases, as they are kept in benchmarks/results/conformance.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import variants
from conformance.compare import distances, worst

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "results" / "conformance.json"
TRAINERS = {"ours": "this project", "trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
THRESHOLDS = {"float64": variants.TOLERANCE, "float32": 1e-4}
"""Relative distances that count. float32 rounds at 6e-8, which a sum or a difference may grow a hundredfold."""


def judged(case: Mapping[str, Any], outcome: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """How far a result is from what the case expects; 0 below the threshold, "nan" where one is not a number."""
    if outcome["status"] != "computed":
        return dict(outcome)
    each = distances(outcome["got"], case["expected"])
    beyond = sorted(name for name, d in each.items() if not d <= THRESHOLDS[dtype])
    if not beyond:
        return {"status": "meets"}
    apart = worst(outcome["got"], case["expected"])
    number = "nan" if math.isnan(apart) else float(f"{apart:.2g}")
    verdict: dict[str, Any] = {"status": "departs", "distance": number, "in": beyond}
    if number == "nan":
        verdict["in"] = sorted(name for name, d in each.items() if math.isnan(d))
    elif dtype == "float64" and (name := variants.name_of(case, outcome["got"])):
        verdict["variant"] = name
    return verdict


def entry(case: Mapping[str, Any], outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Both types, the second only where it says something else; and other ways that a trainer has."""
    found = {dtype: judged(case, outcomes[dtype], dtype) for dtype in THRESHOLDS}
    kept = dict(found["float64"])
    if found["float64"]["status"] == "meets" and found["float32"]["status"] != "meets" and case["float32"]:
        kept["float32"] = found["float32"]
    also = {label: entry(case, both) for label, both in outcomes.get("also", {}).items()}
    return kept | ({"also": also} if also else {})


def table(cases: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> dict[str, Any]:
    """What one trainer made of all cases."""
    return {case["id"]: entry(case, found["results"][case["id"]]) for case in cases}


def as_text(record: Mapping[str, Any]) -> str:
    """One case a line, so that a change is a line."""
    lines = [f'{{\n"versions": {json.dumps(record["versions"])},\n"results": {{']
    for number, (trainer, entries) in enumerate(record["results"].items()):
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
        comma = "," if number + 1 < len(record["results"]) else ""
        lines.append(f"{json.dumps(trainer)}: {{\n{rows}\n}}{comma}")
    return "\n".join([*lines, "}}\n"])


def read() -> dict[str, Any]:
    """The record as it is kept."""
    return json.loads(FILE.read_text())
