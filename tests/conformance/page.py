"""docs/conformance.md: who computes which variant of each formula, from the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.record import ROOT, THRESHOLDS, TRAINERS

PAGE = ROOT / "docs" / "conformance.md"
TITLES = {
    "advantage": "Advantages",
    "surrogate": "Surrogates",
    "kl": "Divergence from the reference",
    "correction": "Corrections for another sampler",
    "aggregation": "Aggregation",
    "value": "Critics",
    "preference": "Preferences",
    "quantisation": "Vectors as a few codes",
    "ranking": "Ranked lists",
    "router": "Routers of mixtures of experts",
    "shaping": "Shaping of rewards",
}
HEAD = """# Conformance

What this project and others compute for the same inputs, beside what the papers print. {num_cases} cases stand in
`tests/conformance/cases` as plain JSON: inputs, parameters, expected values, and for each value whether it was worked
out by hand or by `tests/conformance/twins`, which computes the papers' arithmetic in decimals of 50 digits with
nothing but the standard library. Losses are compared by value and by gradient. The cases take no side about names or
shapes: an adapter of about 300 lines puts them to a trainer (`tests/conformance/adapters`).

This page is generated, and holds only what a run measured:

```sh
uv sync --group bench
(cd benchmarks/peers/verl && uv sync) && (cd benchmarks/peers/openrlhf && uv sync)
python benchmarks/conformance.py             # runs all, prints the tables; --write keeps them here and in results/
```

Versions: {versions}.

**How to read it.** `n/n` is cases met of cases put: within {f64:.0e} relative in float64, and within {f32:.0e} with
float32 inputs. A departure is named where the result equals a variant of the formula, else its distance is given: the
largest difference over the largest expected number, or the difference itself where 0 is expected. A departure is not a
fault: many are choices. Papers are silent about log-ratios beyond 20 (here held there, so that the loss is finite and
the gradient 0), groups of one (here 0), sequences without tokens (here not counted), epsilon (here the case's), and NaN
at masked places (here it reaches nothing); a case of one of these says so in what it pins. `-` is not implemented, or
not callable apart from a training step. Settings are those of the case where the trainer has them, else its own. TRL's
formulas are inside methods of its trainers, which are called on stand-ins. Values that a trainer leaves at masked
places are not compared, gradients are: NaN there would reach the weights.
"""


def cell(entries: Sequence[Mapping[str, Any]]) -> str:
    """One trainer on all cases of one equation, and its other ways of computing it."""
    labels = dict.fromkeys(label for entry in entries for label in entry.get("also", {}))
    ways = [summary([entry["also"][label] for entry in entries]) for label in labels]
    others = [f"{label}: {way}" for label, way in zip(labels, ways, strict=True)]
    return "; ".join([summary(entries), *others]).replace("|", "\\|")


def summary(entries: Sequence[Mapping[str, Any]]) -> str:
    """How many cases are met, and what the others are."""
    put = [e for e in entries if e["status"] not in ("absent", "unfit")]
    if not put:
        return "-"
    met = sum(1 for e in put if e["status"] == "meets" and "float32" not in e)
    notes = [e["variant"] for e in put if "variant" in e]
    notes += [f"not a number in {' and '.join(e['in'])}" for e in put if e.get("distance") == "nan"]
    notes += largest([e for e in put if e["status"] == "departs" and "variant" not in e])
    narrow = [e["float32"] for e in put if "float32" in e]
    notes += [f"in float32 {note}" for note in largest(narrow)]
    notes += ["in float32 not a number" for e in narrow if e.get("distance") == "nan"]
    notes += ["raises" for e in put if e["status"] == "raises"]
    return " ".join([f"{met}/{len(put)}", "; ".join(dict.fromkeys(notes))]).strip()


def largest(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest of distances that have no name, if there is one."""
    found = [e["distance"] for e in entries if e.get("distance", "nan") != "nan"]
    return [f"off by up to {max(found):.2g}"] if found else []


def apart(entry: Mapping[str, Any]) -> str:
    """A distance in words."""
    if entry["status"] == "raises":
        return "raises"
    return "not a number" if entry["distance"] == "nan" else f"off by {entry['distance']:.2g}"


def rows(cases: Sequence[Mapping[str, Any]], results: Mapping[str, Any], kind: str) -> Iterable[str]:
    """One row an equation."""
    names = list(dict.fromkeys(case["name"] for case in cases if case["kind"] == kind))
    for name in names:
        of_name = [case for case in cases if (case["kind"], case["name"]) == (kind, name)]
        source = f"{of_name[0]['paper']}, {of_name[0]['equation']}".replace("|", "\\|")
        cells = [cell([results[trainer][case["id"]] for case in of_name]) for trainer in TRAINERS]
        yield f"| `{name}` | {source} | {' | '.join(cells)} |"


def details(cases: Sequence[Mapping[str, Any]], entries: Mapping[str, Any]) -> Iterable[str]:
    """Every departure of one trainer, those of one case after another, with what the case pins."""
    for case in cases:
        found = entries[case["id"]]
        ways = {"": found} | found.get("also", {})
        for label, entry in ways.items():
            text = long(entry)
            if text:
                yield f"| `{case['id']}`{f' ({label})' if label else ''} | {case['pins']} | {text} |"


def long(entry: Mapping[str, Any]) -> str:
    """A departure in full."""
    if entry["status"] == "raises":
        return entry["why"].replace("|", "\\|")
    if entry["status"] == "meets" and "float32" in entry:
        return f"in float32 {apart(entry['float32'])}"
    if entry["status"] != "departs":
        return ""
    where = f" in {', '.join(entry['in'])}" if "in" in entry else ""
    return f"{apart(entry)}{where}" + (f": {entry['variant']}" if "variant" in entry else "")


def reasons(cases: Sequence[Mapping[str, Any]], entries: Mapping[str, Any]) -> Iterable[str]:
    """Why cases were not put, an equation or a case a line."""
    told: dict[str, list[str]] = {}
    for case in cases:
        found = entries[case["id"]]
        if found["status"] == "absent":
            told.setdefault(found["why"], []).append(f"`{case['name']}`")
        elif found["status"] == "unfit":
            told.setdefault(found["why"], []).append(f"`{case['id']}`")
    for why, names in told.items():
        if why != "not implemented":
            yield f"- {why}: {', '.join(dict.fromkeys(names))}"


def page(cases: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    """The whole page."""
    results = record["results"]
    versions = "; ".join(
        f"{TRAINERS[trainer]}: {', '.join(f'{name} {v}' for name, v in found.items())}"
        for trainer, found in record["versions"].items()
    )
    head = HEAD.format(num_cases=len(cases), versions=versions, f64=THRESHOLDS["float64"], f32=THRESHOLDS["float32"])
    parts = [head]
    columns = f"| equation | source | {' | '.join(TRAINERS.values())} |\n|---|---|{'---|' * len(TRAINERS)}"
    for kind, title in TITLES.items():
        parts.append("\n".join([f"## {title}\n", columns, *rows(cases, results, kind)]) + "\n")
    for trainer, title in TRAINERS.items():
        lines = list(details(cases, results[trainer]))
        if lines:
            top = f"## Departures of {title}\n\n| case | what it pins | result |\n|---|---|---|"
            parts.append("\n".join([top, *lines]) + "\n")
    for trainer, title in TRAINERS.items():
        lines = list(reasons(cases, results[trainer]))
        if lines:
            parts.append("\n".join([f"## Not put to {title}\n", *lines]) + "\n")
    return "\n".join(parts)
