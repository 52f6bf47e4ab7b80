"""Imports go one way: between packages, between the rooms of a package, and between files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import grimp
import pytest
from architecture.source_tree import (
    PACKAGES,
    ROOT,
    Sources,
    Violation,
    import_graph,
    imported_names,
    of_package,
    planted,
    real_sources,
    require_at_most,
)
from importlinter import configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

configuration.configure()  # import-linter's clock and printer, which its contracts use

LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS: dict[str, dict[str, Any]] = {contract["name"]: contract for contract in LINTER["contracts"]}
KINDS = {"layers": LayersContract, "forbidden": ForbiddenContract}

PLANTED_IMPORTS = {
    # contract: (importer, imported), an import that the contract must refuse
    "the command line is on top, errors and plumbing at the bottom": ("rft_dist.collectives", "rft_engine.completions"),
    "plumbing and equations need torch alone": ("rft_algos.losses.kl", "numpy"),
    "models and ranks need no equation": ("rft_models.policy.load", "rft_algos.losses.kl"),
    "the command line reaches below the library for settings and the run reader only": (
        "rft_cli.commands.training",
        "rft_trainer.loops.rl",
    ),
    "kernels behind one package": ("rft_engine.hf_engine", "rft_kernels.ops"),
    "rooms of rft_core": ("rft_core.errors", "rft_core.durable_files"),
    "rooms of rft_algos": ("rft_algos.advantages.gae", "rft_algos.surrogates.ppo"),
    "rooms of rft_models": ("rft_models.policy.load", "rft_models.decode.fast_decoder"),
    "rooms of rft_dist": ("rft_dist.health.monitor", "rft_dist.launch.spawn"),
    "rooms of rft_engine": ("rft_engine.vllm.engine", "rft_engine.sglang.engine"),
    "rooms of rft_trainer": ("rft_trainer.rewards.math", "rft_trainer.loops.rl"),
    "rooms of rft": ("rft.build.models", "rft.stages.rl"),
    "rooms of rft_genrec": ("rft_genrec.catalogue.records", "rft_genrec.prompts.builder"),
    "rooms of rft_cli": ("rft.config.values", "rft_cli.commands.training"),
    "rooms of rft_kernels": ("rft_kernels.tiles", "rft_kernels.ops"),
    "transformers, tokenizers and peft in rft_models only": ("rft_trainer.data.prompts", "tokenizers"),
    "the Hub in rft only; transformers' own errors of configurations in rft_models": (
        "rft_trainer.data.sources",
        "huggingface_hub",
    ),
    "process groups and deepspeed in rft_dist only": ("rft.stages.rl", "deepspeed"),
    "vllm and sglang in rft_engine only": ("rft.build.engines", "vllm"),
    "triton in the kernels only": ("rft_models.logprobs.backend", "triton"),
    "pages for people in rft_cli only": ("rft.front_end", "rich"),
    "files of settings in rft and rft_cli only": ("rft_trainer.runs.reader", "yaml"),
}

ONLY_IN = {
    "transformers": "rft_models",
    "tokenizers": "rft_models",
    "vllm": "rft_engine",
    "sglang": "rft_engine",
    "deepspeed": "rft_dist",
    "torch.distributed": "rft_dist",
    "triton": "rft_kernels",
    "wandb": "rft_trainer.sinks",
    "trackio": "rft_trainer.sinks",
    "mlflow": "rft_trainer.sinks",
    "tensorboard": "rft_trainer.sinks",
    "torch.utils.tensorboard": "rft_trainer.sinks",
    "rich": "rft_cli",
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of the workspace, as import-linter sees it."""
    return grimp.build_graph(*LINTER["root_packages"], include_external_packages=True, cache_dir=None)


def is_kept(contract: Mapping[str, Any], graph: grimp.ImportGraph) -> bool:
    """Whether `graph` has no import that `contract` refuses; ignored imports are taken out of `graph`."""
    options = {key: str(value) if isinstance(value, bool) else value for key, value in contract.items()}
    checker = KINDS[contract["type"]](name=contract["name"], session_options=LINTER, contract_options=options)
    return checker.check(graph=graph, verbose=False).kept


def test_every_contract_has_a_planted_import() -> None:
    assert set(PLANTED_IMPORTS) == set(CONTRACTS)
    assert not LINTER.get("exclude_type_checking_imports"), "a typing-only import ties two rooms as well"


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_refuses_a_planted_import(name: str, graph: grimp.ImportGraph) -> None:
    importer, imported = PLANTED_IMPORTS[name]
    changed = deepcopy(graph)
    assert importer in changed.modules, f"{importer} is gone: plant the import elsewhere"
    if imported not in changed.modules:
        changed.add_module(imported, is_squashed=True)
    changed.add_import(importer=importer, imported=imported)
    assert not is_kept(CONTRACTS[name], changed)


def test_the_contracts_hold(graph: grimp.ImportGraph) -> None:
    broken = [name for name, contract in CONTRACTS.items() if not is_kept(contract, deepcopy(graph))]
    assert not broken, "lint-imports shows the imports"


def import_cycles(sources: Sources) -> list[list[str]]:
    """Groups of files each of which imports, over others of its group, itself: Tarjan's connected components."""
    graph = import_graph(sources)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            start = stack.index(name)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                cycles.append(sorted(component))

    for name in graph:
        if name not in order:
            visit(name)
    return cycles


def test_files_import_one_another_in_no_circle() -> None:
    assert import_cycles(real_sources()) == []


def test_a_planted_circle_is_found() -> None:
    sources = planted(
        a____init__="",
        a__one="from a import two",
        a__two="def f():\n    from . import three",
        a__three="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.one import One",
        a__four="import a.one",
    )
    assert import_cycles(sources) == [["a.one", "a.three", "a.two"]]


def misplaced_libraries(sources: Sources) -> list[Violation]:
    """Imports of a library of others outside the one package, or room, that may import it."""
    found: list[Violation] = []
    for module in sources.values():
        for line, base, member in imported_names(module):
            full = f"{base}.{member}" if member else base
            for library, owner in ONLY_IN.items():
                if f"{full}.".startswith(f"{library}.") and not f"{module.name}.".startswith(f"{owner}."):
                    found.append(Violation(module.name, line, f"{library} belongs to {owner}"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_library_is_imported_in_its_own_package_only(package: str) -> None:
    require_at_most(misplaced_libraries(of_package(package, real_sources())), 0)


def test_a_planted_library_is_found() -> None:
    sources = planted(
        rft_trainer__loops__rl="def f():\n    import torch.distributed as dist",
        rft_trainer__metrics__sink="from torch.utils import tensorboard",
        rft_trainer__sinks__tensorboard="from torch.utils import tensorboard",
        rft_dist__collectives="from torch import distributed",
        rft__rl="import vllm_flash, torch",
    )
    assert [v.module for v in misplaced_libraries(sources)] == ["rft_trainer.loops.rl", "rft_trainer.metrics.sink"]


def imported_doubles(sources: Sources) -> list[Violation]:
    """Imports of a room `testing` of the workspace by a module outside such rooms."""
    found: list[Violation] = []
    for module in sources.values():
        if "testing" in module.name.split("."):
            continue
        for line, base, member in imported_names(module):
            path = [*base.split("."), member]
            if path[0] in PACKAGES and "testing" in path:
                found.append(Violation(module.name, line, f"imports {base}"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_shipped_needs_no_test_double(package: str) -> None:
    require_at_most(imported_doubles(of_package(package, real_sources())), 0)


def test_a_planted_test_double_is_found() -> None:
    sources = planted(
        rft_engine__native__engine="from rft_engine.testing.table_model import FakeCache",
        rft_engine__hf_engine="from rft_engine import testing",
        rft_engine__testing__worker="from rft_engine.testing.table_model import FakeCache",
        rft_kernels__ops="from triton.testing import do_bench",
    )
    assert [v.module for v in imported_doubles(sources)] == ["rft_engine.native.engine", "rft_engine.hf_engine"]
