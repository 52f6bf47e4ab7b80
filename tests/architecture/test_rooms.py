"""A folder is a room: few modules, a name in the import contracts, and nothing beside the rooms without a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from architecture.source_tree import (
    INIT,
    PACKAGES,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
    require_needed,
)

MOST_MODULES = 16

ROOT_MODULES = {
    # what stands beside the rooms, `protocols` and `settings` apart, which any package may have
    "rft": {
        "check",
        "conformance",
        "decoder_sizes",
        "front_end",
        "replica_main",
        "resolved",
        "reward_kinds",
        "reward_names",
        "run_lifecycle",
    },
    "rft_algos": {"aliases", "input_checks", "statistics"},
    "rft_cli": {"main", "pretrain"},
    "rft_core": {
        "checkpoint_places",
        "child_process",
        "device_copies",
        "durable_files",
        "errors",
        "fault_points",
        "file_access",
        "exact_records",
        "host_memory",
        "json_records",
        "keyed_random",
        "nearest_names",
        "packed_tokens",
        "secrets",
        "terminal_text",
        "user_code",
    },
    "rft_dist": {"collectives"},
    "rft_engine": {
        "build_request",
        "completions",
        "engine_base",
        "hf_engine",
        "lifecycle",
        "registry",
        "request_checks",
        "slowness",
        "typed_lists",
    },
    "rft_genrec": set[str](),
    "rft_kernels": {"ops", "row_statistics", "tiles"},
    "rft_models": set[str](),
    "rft_trainer": set[str](),
}
ANYWHERE = {INIT, "protocols", "settings"}


def crowded_folders(sources: Sources, most: int = MOST_MODULES) -> list[Violation]:
    """Folders with more modules than fit in one glance."""
    counts = Counter(module.folder for module in sources.values() if module.stem != INIT)
    return [Violation(folder, 1, f"{count} modules") for folder, count in sorted(counts.items()) if count > most]


def modules_beside_the_rooms(sources: Sources, allowed: Mapping[str, set[str]]) -> list[Violation]:
    """Modules in the root folder of their package that are not named there."""
    return [
        Violation(module.name, 1, "belongs into a room")
        for module in sources.values()
        if module.folder == module.package and module.stem not in ANYWHERE | allowed[module.package]
    ]


def folders_without_a_package_file(sources: Sources) -> list[Violation]:
    """Folders that lack the `__init__` whose docstring says what the room is for."""
    folders = {module.folder for module in sources.values()}
    return [Violation(folder, 1, "has no __init__") for folder in sorted(folders) if f"{folder}.{INIT}" not in sources]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_is_seen_in_one_glance(package: str) -> None:
    sources = of_package(package, real_sources())
    require_at_most(crowded_folders(sources), 0)
    require_at_most(folders_without_a_package_file(sources), 0)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_live_in_rooms(package: str) -> None:
    sources = of_package(package, real_sources())
    require_at_most(modules_beside_the_rooms(sources, ROOT_MODULES), 0)
    present = {module.stem for module in sources.values() if module.folder == package}
    require_needed(ROOT_MODULES[package], present)


def test_a_planted_crowd_is_found() -> None:
    sources = planted(**{f"a__room__m{i}": "" for i in range(3)}, a__room____init__="", a__other__m="")
    assert [v.module for v in crowded_folders(sources, most=2)] == ["a.room"]
    assert crowded_folders(sources, most=3) == []
    assert [v.module for v in folders_without_a_package_file(sources)] == ["a.other"]


def test_a_planted_module_beside_the_rooms_is_found() -> None:
    sources = planted(a____init__="", a__settings="", a__ops="", a__stray="", a__room__stray="")
    assert [v.module for v in modules_beside_the_rooms(sources, {"a": {"ops"}})] == ["a.stray"]
