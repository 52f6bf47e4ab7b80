"""A command that trains is named by its record, and by modules of its own; every other module reads the record."""

from __future__ import annotations

import ast
import re

from architecture.source_tree import Module, Sources, Violation, planted, real_sources, require_needed

from rft_cli.commands.table import BUILT_IN

NAMES = [command.name for command in BUILT_IN if command.training]
ALONE = [name for name in NAMES if name != "pretrain"]
"""Names that are no setting's too: alone they name the command."""
NAMED = re.compile(rf"({'|'.join(ALONE)})$|rft-train ({'|'.join(NAMES)})$|.*rft-train ({'|'.join(NAMES)})\b", re.S)

ALLOWED = {
    # names of functions
    "rft.__init__",
    "rft.config.commands",
    "rft_cli.commands.table",
    # modules of one command: what it proposes at its end, and the quickstart, which trains by two commands
    "rft_cli.pages.advice",
    "rft_cli.commands.quickstart.command",
    # what the façade's keywords are the settings of
    "rft_cli.lightrft.keywords",
    # what the fields of the pre-trainer's guide are settings of, and the commands of its tasks
    "rft_cli.pretrainer.translation",
    # what to write for methods that are no algorithms of reinforcement learning
    "rft.build.algorithm",
}


def is_documentation(module: Module) -> set[int]:
    """The constants that stand as statements: docstrings, and texts below fields."""
    return {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}


def command_names(sources: Sources) -> list[Violation]:
    """Texts of code that name a command which trains."""
    return [
        Violation(module.name, node.lineno, repr(node.value))
        for module in sources.values()
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAMED.match(node.value)
        and id(node) not in is_documentation(module)
    ]


def test_no_other_module_names_a_command_that_trains() -> None:
    sources = {name: module for name, module in real_sources().items() if module.package in ("rft", "rft_cli")}
    found = command_names(sources)
    assert [str(violation) for violation in found if violation.module not in ALLOWED] == []
    require_needed(ALLOWED, {violation.module for violation in found})


def test_planted_names_are_found() -> None:
    sources = planted(
        a='"""Runs `rft-train rl`."""\nif command == "sft": print(f"rft-train rl --pretrain {path}")',
        b='kind = "rlx"\nprint("rft-train rlx", "sft/loss", "sft.no_held_out")',
    )
    assert [(violation.module, violation.what) for violation in command_names(sources)] == [
        ("a", "'sft'"),
        ("a", "'rft-train rl --pretrain '"),
    ]
