"""Write cases/*.json from `definitions` and `twins`: the same files from every machine.

python -m conformance.make_cases, with tests/ on the path; --check says which files would change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from conformance.definitions import ALL
from conformance.definitions.case import Case
from conformance.twins import expected

FOLDER = Path(__file__).with_name("cases")


def by_hand(value: Any) -> Any:
    """Floats nearest to fractions written as text, in nested lists."""
    if isinstance(value, list):
        return [by_hand(item) for item in value]
    return float(Fraction(value))


def as_data(case: Case) -> dict[str, Any]:
    """The case as it stands in a file."""
    results = expected(case.kind, case.name, case.inputs, case.params)
    origin = dict.fromkeys(results, "twin")
    for key, value in (case.hand or {}).items():
        assert key in results, f"{case.id}: no result {key}"
        results[key], origin[key] = by_hand(value), "hand"
    return {
        "id": case.id,
        "kind": case.kind,
        "name": case.name,
        "pins": case.pins,
        "paper": case.source.paper,
        "equation": case.source.where,
        "inputs": dict(case.inputs),
        "params": dict(case.params),
        "float32": case.float32,
        "expected": results,
        "origin": origin,
        **({"arithmetic": case.arithmetic} if case.arithmetic else {}),
    }


def as_text(cases: Iterable[Mapping[str, Any]]) -> str:
    """One case a block, one field a line: a change of a number is a change of a line."""
    blocks = []
    for case in cases:
        fields = [f"    {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in case.items()]
        blocks.append("  {\n" + ",\n".join(fields) + "\n  }")
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def files() -> dict[Path, str]:
    """Every file and what belongs in it."""
    kinds = sorted({case.kind for case in ALL})
    return {FOLDER / f"{kind}.json": as_text(as_data(c) for c in ALL if c.kind == kind) for kind in kinds}


def read() -> list[dict[str, Any]]:
    """The cases of all files, as they stand there."""
    return [case for path in sorted(FOLDER.glob("*.json")) for case in json.loads(path.read_text())]


def main() -> None:
    """Write the files, or with --check name those that differ."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale: {[path.name for path in stale]}" if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
    print(f"{len(ALL)} cases; changed: {[path.name for path in stale]}")


if __name__ == "__main__":
    main()
