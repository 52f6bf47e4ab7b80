"""Functions take few arguments, and an object's abilities are read from its protocol, not from its class."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from architecture.source_tree import (
    PACKAGES,
    ROOT,
    FunctionNode,
    Module,
    Sources,
    Violation,
    of_package,
    planted,
    real_sources,
    require_at_most,
    require_listed,
    require_needed,
)

RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
MOST_ARGUMENTS = RUFF["pylint"]["max-args"]

LONG_SIGNATURES: dict[str, int] = {
    "rft": 4,
    "rft_algos": 3,
    "rft_cli": 0,
    "rft_core": 0,
    "rft_dist": 2,
    "rft_engine": 0,
    "rft_genrec": 0,
    "rft_models": 11,
    "rft_trainer": 6,
    "rft_kernels": 13,
}
"""Functions of each package with more arguments; ruff's PLR0913 refuses them in files that have none yet."""

TYPE_CHECKS: dict[str, int] = {
    "rft.build.algorithm": 2,
    "rft.build.engines": 2,
    "rft.build.images": 3,
    "rft.build.judge": 2,
    "rft.build.prompt_data": 1,
    "rft.planning.image_tokens": 1,
    "rft.process.monitored": 1,
    "rft_algos.objectives.advantages": 5,
    "rft_dist.checkpoints.rank_exchange": 1,
    "rft_dist.checkpoints.writer": 1,
    "rft_dist.health.failure": 1,
    "rft_dist.health.monitor": 2,
    "rft_dist.health.termination": 1,
    "rft_engine.native.memory_budget": 1,
    "rft_engine.process.backend_engine": 1,
    "rft_engine.process.process_engine": 1,
    "rft_engine.process.server": 1,
    "rft_engine.replicas.process": 1,
    "rft_engine.vllm.engine": 2,
    "rft_engine.vllm.worker_extension": 1,
    "rft_kernels.ops": 1,
    "rft_kernels.row_statistics": 1,
    "rft_models.decode.cuda_graphs": 1,
    "rft_models.loading.transformers_loading": 1,
    "rft_models.logprobs.vocab_slabs": 1,
    "rft_models.reward_model.shared_images": 1,
    "rft_models.vision.media": 1,
    "rft_trainer.async_rollouts.multi_turn": 2,
    "rft_trainer.async_rollouts.rank_share": 1,
    "rft_trainer.async_rollouts.single_turn": 1,
    "rft_trainer.data.media_cache": 1,
    "rft_trainer.data.readers.json": 1,
    "rft_trainer.environments.protocol": 1,
    "rft_trainer.environments.tool_calls": 1,
    "rft_trainer.loops.trainer": 1,
    "rft_trainer.rewards.judge": 1,
    "rft_trainer.rewards.servers.remote_judge": 1,
    "rft_trainer.rollouts.trained_policy": 1,
    "rft_trainer.runs.checkpointing": 1,
    "rft_trainer.runs.trajectories": 2,
}
"""Questions of each module about the class or the members of an object of the workspace; the numbers may only fall."""


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Every argument but the object itself, as PLR0913 counts them."""
    named = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in named if name not in ("self", "cls") and not name.startswith("_")]


def long_signatures(sources: Sources, most: int = MOST_ARGUMENTS) -> list[Violation]:
    """Functions with more than `most` arguments."""
    return [
        Violation(module.name, node.lineno, f"{node.name} has {len(arguments_of(node))} arguments")
        for module in sources.values()
        for node in module.nodes
        if isinstance(node, FunctionNode) and len(arguments_of(node)) > most
    ]


def workspace_names(module: Module) -> set[str]:
    """Names in a module that stand for classes of the workspace, or for modules that hold them."""
    names = {node.name for node in module.nodes if isinstance(node, ast.ClassDef)}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in PACKAGES):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or "" for alias in node.names if alias.name.split(".")[0] in PACKAGES}
    return names


def members_of_classes(sources: Sources) -> set[str]:
    """Public members of every class of the workspace: fields, methods, and what methods assign to `self`."""
    members: set[str] = set()
    for module in sources.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                members |= {part.name for part in node.body if isinstance(part, FunctionNode)}
                annotated = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                members |= {target.id for target in annotated if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                members.add(node.attr)
    return {name for name in members if not name.startswith("__")}


def asked_classes(node: ast.AST) -> Iterator[ast.expr]:
    """The classes that a call of isinstance or issubclass, or a pattern, asks for."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        yield from node.args[1:2]
    elif isinstance(node, ast.MatchClass):
        yield node.cls


def asked_member(node: ast.Call) -> str | None:
    """The member that a call of hasattr asks for, if it is written there."""
    if isinstance(node.func, ast.Name) and node.func.id == "hasattr":
        name = node.args[1]
        return str(name.value) if isinstance(name, ast.Constant) else None
    return None


def type_checks(sources: Sources, members: set[str]) -> list[Violation]:
    """Places that ask an object whether it is of a class of the workspace, or has a member that such classes have."""
    found: list[Violation] = []
    for module in sources.values():
        names = workspace_names(module)
        for node in module.nodes:
            for asked in asked_classes(node):
                if names & {part.id for part in ast.walk(asked) if isinstance(part, ast.Name)}:
                    found.append(Violation(module.name, asked.lineno, ast.unparse(node)[:80]))
            if isinstance(node, ast.Call) and asked_member(node) in members:
                found.append(Violation(module.name, node.lineno, ast.unparse(node)[:80]))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_signatures_are_short(package: str) -> None:
    require_at_most(long_signatures(of_package(package, real_sources())), LONG_SIGNATURES[package])


def test_files_excused_from_short_signatures_need_it() -> None:
    """Of the paths below `per-file-ignores`, those that name one shipped file each."""
    excused = {path for path, rules in RUFF["per-file-ignores"].items() if "PLR0913" in rules and "*" not in path}
    long = {violation.module.replace(".", "/") + ".py" for violation in long_signatures(real_sources())}
    require_needed({path.split("/src/")[1] for path in excused if "/src/" in path}, long)
    assert all((ROOT / PurePosixPath(path)).is_file() for path in excused)


@pytest.fixture(scope="module")
def members() -> set[str]:
    """What the classes of all packages have."""
    return members_of_classes(real_sources())


@pytest.mark.parametrize("package", PACKAGES)
def test_protocols_stand_in_place_of_type_checks(package: str, members: set[str]) -> None:
    found = type_checks(of_package(package, real_sources()), members)
    require_listed(found, TYPE_CHECKS)
    listed = [name for name in TYPE_CHECKS if name.split(".")[0] == package]
    require_needed(listed, {violation.module for violation in found})


def test_planted_signatures_are_found() -> None:
    sources = planted(
        a__one="""
class A:
    def f(self, a, b, /, c, *args, d, **rest): ...
    def g(self, a, b, c): ...
async def h(a, b, c, d, _e): ...
"""
    )
    assert {violation.what.split()[0] for violation in long_signatures(sources, most=3)} == {"f", "h"}


def test_planted_type_checks_are_found() -> None:
    sources = planted(
        rft__one="""
from rft_engine.native.engine import NativeEngine as Native
import rft_engine.replicas.engine as replicas, torch
class Here:
    size: int
    def wake(self): self.awake = True
isinstance(x, Native)
isinstance(x, (int, Here))
isinstance(x, int | replicas.ReplicaEngine)
issubclass(type(x), torch.nn.Module)
hasattr(x, "wake") or hasattr(x, "awake") or hasattr(x, "size")
hasattr(x, "shape") or hasattr(x, name)
match x:
    case Here(size=1) | int(): ...
"""
    )
    lines = sorted(violation.line for violation in type_checks(sources, members_of_classes(sources)))
    assert lines == [7, 8, 9, 11, 11, 11, 14]
