"""What the documentation tells a person to type is understood, and what it links to is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands import export, plan, recipes
from rft_cli.commands.quickstart import command
from rft_cli.config import recipes as catalog
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import command_of_words, commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += [*sorted(ROOT.glob("packages/*/README.md")), ROOT / "kernels" / "README.md"]
SCRIPTS = [ROOT / "examples" / name for name in ("train.py", "train_vl.py", "my_reward.py")]
SHELLS = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.M | re.S)

_PROGRAMS = {"rft-train": (), "examples/train.py": ("rl",), "rft_cli.pretrain": ("pretrain",)}
"""Forms of the program, and the words that each stands for."""


def commands_of(path: Path) -> list[str]:
    """Every shell line of a page; lines that end with a backslash are joined."""
    text = path.read_text()
    lines = [line for block in SHELLS.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    if path.suffix == ".py":
        lines = [line.strip() for line in str(ast.get_docstring(ast.parse(text))).splitlines() if line.startswith(" ")]
    return [line for line in lines if "rft-train " in line or "examples/train.py" in line or "rft_cli." in line]


def documented() -> list[Any]:
    """(page, line) of each command line."""
    found = [(path, line) for path in (*PAGES, *SCRIPTS) for line in commands_of(path)]
    return [pytest.param(line, id=f"{path.relative_to(ROOT)}: {line}") for path, line in found]


def words_of(line: str) -> list[str]:
    """The words after the program, whichever of its forms the line uses; its name is not among them."""
    line = re.sub(r"\$\([^)]*\)", "PLACE", line)
    program = next(name for name in (*_PROGRAMS, "rft_cli.main") if name in line)
    words = shlex.split(line.rpartition(program)[2].split(";")[0].rstrip(" &"), comments=True)
    return [*_PROGRAMS.get(program, ()), *words]


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_is_understood(line: str, rft_train: Callable[..., Any]) -> None:
    verb, words = command_of_words(words_of(line))
    for name in ("my.yaml", "more.yaml") if "recipes" not in line else ():
        Path(name).write_text("seed: 3\n")
    Path("examples").symlink_to(ROOT / "examples")
    assert verb in commands(), line
    if {"-h", "--help", "--help-all"} & set(words):
        assert rft_train(verb, *words).code == 0
    elif verb == "quickstart":
        command.parse(words)
    elif verb == "recipes" and words[:1] == ["run"]:
        assert words[1] in catalog.names()
        assert [word for word in words[2:] if word.startswith("--") and word not in recipes.USAGE] == []
    elif verb == "export":
        assert len(export.parse(words).words) == 2
    elif verb in ("runs", "recipes", "rollouts"):
        outcome = rft_train(verb, *words, "--json_errors")
        assert outcome.code == 0 or outcome.problem["code"] in ("run.unknown_name", "answers.no_file"), outcome.err
    else:
        understood(verb, words)


def understood(verb: str, words: list[str]) -> None:
    """Resolve the settings of the line; a run in the place of a model stands for its own settings."""
    if verb == "check":
        verb, words = command_of_words(words)
        words = [word for word in words if word != "..."]
    if verb == "plan":
        asked = plan.sort_words(words)
        verb, words = asked.command, [*asked.words, *(("--pretrain", "MODEL") if asked.family else ())]
    if verb == "resume":
        verb, words = "rl", ["--pretrain", *words]
    for flag, other in commands()[verb].switches:
        if flag in words:
            words.remove(flag)
            verb = other
    if commands()[verb].takes_run and words and not words[0].startswith("-"):
        words = ["--pretrain", *words]
    words = [word for word in words if word not in ("--print_config", "--json_errors")]
    resolve(verb, commands()[verb].with_flag(words))


def test_there_are_commands_in_the_documentation() -> None:
    assert len(documented()) > 30


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    absent = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert absent == []


def test_every_guide_is_in_the_list_of_guides() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")]
    assert [str(page) for page in pages if str(page) != "README.md" and f"({page})" not in listed] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in commands() if f"`rft-train {name.replace('genrec-', 'genrec ')}`" not in text] == []


def test_the_test_command_stands_where_it_is_looked_for() -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^<!-- test command -->\n```sh\n(.*?)^```$", text, flags=re.M | re.S)
    assert "pytest" in block
    assert block.count("\n") == 1
