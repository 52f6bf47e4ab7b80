"""The present counts of every rule with a ceiling, in the form of the tables that hold the ceilings.

`python tests/architecture/count_violations.py` prints the tables; with `-v`, every place as well; with `--lower`, it
takes down the numbers in the test modules that have become smaller, and never raises one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder `architecture`, as for pytest

from architecture import test_docstrings, test_literals, test_names, test_signatures
from architecture.source_tree import Violation, per_module, per_package, real_sources

COUNTED = {
    # rules whose tables count the places in a package, or in a module
    "test_names.CEILINGS": (test_names.private_names, per_package),
    "test_docstrings.CEILINGS": (test_docstrings.poor_docstrings, per_package),
    "test_signatures.LONG_SIGNATURES": (test_signatures.long_signatures, per_package),
    "test_literals.CEILINGS": (test_literals.foreign_names, per_module),
    "test_signatures.TYPE_CHECKS": (
        lambda sources: test_signatures.type_checks(sources, test_signatures.members_of_classes(sources)),
        per_module,
    ),
}
NAMED = {
    # rules whose tables count the modules that share a name
    "test_names.SHARED_CLASSES": test_names.shared_class_names,
    "test_names.SHARED_STEMS": test_names.shared_stems,
}


def table(counts: dict[str, int]) -> str:
    """A dictionary with one entry a line."""
    return "{\n" + "".join(f'    "{name}": {count},\n' for name, count in counts.items()) + "}"


def lower(title: str, counts: dict[str, int]) -> None:
    """Write the counts that are smaller than the ceilings of `title` into its module."""
    module, _, name = title.partition(".")
    path = Path(__file__).with_name(f"{module}.py")
    ceilings: dict[str, int] = getattr(sys.modules[f"architecture.{module}"], name)
    lowered = {key: min(ceiling, counts[key]) for key, ceiling in ceilings.items() if key in counts}
    pattern = rf"^{name}: dict\[str, int\] = \{{.*?\}}"
    text = re.sub(pattern, f"{name}: dict[str, int] = {table(lowered)}", path.read_text(), count=1, flags=re.M | re.S)
    path.write_text(text)


def main() -> None:
    """Print or lower the table of every rule."""
    sources = real_sources()
    tables: dict[str, dict[str, int]] = {}
    places: dict[str, list[str]] = {}
    for title, (rule, per) in COUNTED.items():
        violations: list[Violation] = rule(sources)
        tables[title], places[title] = per(violations), [str(violation) for violation in violations]
    for title, shared in NAMED.items():
        names = shared(sources)
        tables[title] = {name: len(modules) for name, modules in names.items()}
        places[title] = [f"{name}: {', '.join(modules)}" for name, modules in names.items()]
    for title, counts in tables.items():
        if "--lower" in sys.argv:
            lower(title, counts)
        else:
            print(f"# {sum(counts.values())} together\n{title} = {table(counts)}\n")
    if "-v" in sys.argv:
        for title, lines in places.items():
            print(title, *lines, sep="\n  ")


if __name__ == "__main__":
    main()
