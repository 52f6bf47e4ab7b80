"""The present counts of every rule with a ceiling, in the form of the tables that hold the ceilings.

Run as `python tests/architecture/count_violations.py`, and lower a table after a clean-up.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder `architecture`, as for pytest

from architecture import test_docstrings, test_errors, test_literals, test_names, test_output, test_signatures
from architecture.source_tree import Violation, per_module, per_package, real_sources


def shown(title: str, counts: dict[str, int]) -> None:
    """Print one table, and how many that are together."""
    print(f"{title} = {{  # {sum(counts.values())} together")
    for name, count in counts.items():
        print(f'    "{name}": {count},')
    print("}\n")


def main() -> None:
    """Print the table of every rule; with `-v`, every place as well."""
    sources = real_sources()
    packages: dict[str, list[Violation]] = {
        "test_names.CEILINGS": test_names.private_names(sources),
        "test_docstrings.CEILINGS": test_docstrings.poor_docstrings(sources),
        "test_signatures.LONG_SIGNATURES": test_signatures.long_signatures(sources),
    }
    modules: dict[str, list[Violation]] = {
        "test_literals.CEILINGS": test_literals.foreign_names(sources),
        "test_signatures.TYPE_CHECKS": test_signatures.type_checks(sources),
        "test_output.PROTOCOL_MODULES": test_output.printing_calls(sources),
    }
    places: dict[str, dict[str, list[str]]] = {
        "test_names.SHARED_CLASSES": test_names.shared_class_names(sources),
        "test_names.SHARED_STEMS": test_names.shared_stems(sources),
        "test_errors.SHARED_CODES": test_errors.shared_codes(sources),
    }
    for title, found in packages.items():
        shown(title, per_package(found))
    for title, found in modules.items():
        shown(title, per_module(found))
    for title, names in places.items():
        shown(title, {name: len(modules_of_name) for name, modules_of_name in names.items()})
    if "-v" in sys.argv:
        for title, found in (packages | modules).items():
            print(title, *found, sep="\n  ")
        for title, names in places.items():
            print(title, *(f"{name}: {', '.join(where)}" for name, where in names.items()), sep="\n  ")


if __name__ == "__main__":
    main()
