"""Findings on packages that add commands to `rft-train`."""

from __future__ import annotations

from collections.abc import Iterable

from rft.config.commands import PackageRecord
from rft.installation.facts import MachineFact


def plug_ins(records: Iterable[PackageRecord]) -> list[MachineFact]:
    """Return facts on packages that add commands: those whose records cannot be used are noted."""
    facts: dict[str, MachineFact] = {}
    for found in records:
        value = f"adds {found.name.replace('-', ' ')}"
        if found.fault:
            facts[found.name] = MachineFact(found.package, value, "note", found.fault, "mend or uninstall that package")
        elif found.package in facts:
            facts[found.package] = MachineFact(found.package, f"{facts[found.package].value}, {value[5:]}")
        else:
            facts[found.package] = MachineFact(found.package, value)
    return list(facts.values())
