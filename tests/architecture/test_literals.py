"""An engine or a strategy is named by its own package; elsewhere its capabilities decide, not its name."""

from __future__ import annotations

import ast

import pytest
from architecture.source_tree import (
    PACKAGES,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_listed,
    require_needed,
)

OWNERS = {
    **dict.fromkeys(("vllm", "sglang", "native", "hf"), "rft_engine"),
    **dict.fromkeys(("fsdp", "zero", "ddp"), "rft_dist"),
}
"""Which package may write a name as a string."""

CEILINGS: dict[str, int] = {
    "rft.config.rules.strategy": 2,
    # the choices of a setting as a type, written from the code
    "rft.library.keywords.shared_keywords": 8,
    "rft_dist.preflight.rank_facts": 1,
    "rft_models.loading.transformers_loading": 2,
}
"""Modules that still compare with such names, and how often; the numbers may only fall."""


def foreign_names(sources: Sources) -> list[Violation]:
    """Names of engines and strategies written as strings outside the package that owns them."""
    return [
        Violation(module.name, node.lineno, repr(node.value))
        for module in sources.values()
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and OWNERS.get(node.value, module.package) != module.package
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_engines_and_strategies_are_not_told_apart_by_name(package: str) -> None:
    found = foreign_names(of_package(package, real_sources()))
    require_listed(found, CEILINGS)
    listed = [name for name in CEILINGS if name.split(".")[0] == package]
    require_needed(listed, {violation.module for violation in found})


def test_planted_names_are_found() -> None:
    sources = planted(
        rft__build__engines='if engine == "vllm" or strategy in ("fsdp", "x"): ...',
        rft_engine__registry='ENGINES = {"vllm": 1, "hf": 2}\nstrategy = "zero"',
        rft_dist__settings='strategy: Literal["ddp", "fsdp"] = "ddp"\nengine: "native"',
    )
    found = [(violation.module, violation.what) for violation in foreign_names(sources)]
    assert sorted(found) == [
        ("rft.build.engines", "'fsdp'"),
        ("rft.build.engines", "'vllm'"),
        ("rft_dist.settings", "'native'"),
        ("rft_engine.registry", "'zero'"),
    ]
    with pytest.raises(AssertionError):
        require_listed(
            foreign_names(sources), {"rft.build.engines": 1, "rft_dist.settings": 1, "rft_engine.registry": 1}
        )
