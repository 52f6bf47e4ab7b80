"""Groups of settings: their names before a setting's own, two groups of one class, and files with groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rft.config.command_record import Command
from rft.config.errors import SettingsError
from rft.config.schema import schema
from rft.settings import SeedSettings
from rft_cli.config.help import print_help
from rft_cli.config.resolve import resolve
from rft_cli.records import discovery


@dataclass(frozen=True, kw_only=True)
class SizeSettings:
    """Sizes of a model."""

    hidden: int = field(default=8, metadata={"minimum": 2, "aliases": ("width",)})
    """Width."""
    tied: bool = True
    """One matrix for both ends."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """A large and a small model."""

    teacher: SizeSettings = field(default_factory=lambda: SizeSettings(hidden=64), metadata={"prefixed": True})
    student: SizeSettings = field(default_factory=SizeSettings, metadata={"prefixed": True})
    run: SeedSettings = field(default_factory=SeedSettings)


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command with two groups of one class."""
    known = discovery.commands() | {
        "pair": Command(name="pair", summary="train two", settings=f"{__name__}:PairSettings", essential="student_tied")
    }
    monkeypatch.setattr(discovery, "commands", lambda: known)
    schema.cache_clear()
    yield
    schema.cache_clear()


def sizes(*words: str) -> tuple[int, bool, int, bool, int]:
    found: Any = resolve("pair", words).settings
    return (found.teacher.hidden, found.teacher.tied, found.student.hidden, found.student.tied, found.run.seed)


def codes(call: Callable[[], object]) -> list[tuple[str, str]]:
    with pytest.raises(SettingsError) as caught:
        call()
    return [(problem.code, problem.do) for problem in caught.value.problems]


def test_a_prefixed_group_gives_its_name_to_its_settings() -> None:
    assert list(schema("pair")) == ["teacher_hidden", "teacher_tied", "student_hidden", "student_tied", "seed", "debug"]
    assert sizes() == (64, True, 8, True, 42)


@pytest.mark.parametrize(
    "words",
    [
        "--student-hidden 4 --no-teacher-tied --seed 7",
        "--student_hidden=4 --teacher_tied false --run-seed 7",
        "--student.hidden 4 --no_teacher_tied --run.seed=7",
        "--student-width 4 --no-teacher.tied --run_seed 7",
    ],
)
def test_every_form_of_a_name_is_the_same_setting(words: str) -> None:
    assert sizes(*words.split()) == (64, False, 4, True, 7)


@pytest.mark.parametrize(
    "text",
    [
        "student_hidden: 4\nteacher_tied: false\nseed: 7\n",
        "student: {hidden: 4}\nteacher:\n  tied: no\nrun: {seed: 7}\n",
        "student.hidden: 4\nteacher: {tied: 0}\nrun.seed: 7\n",
        "student-hidden: 4\nteacher-tied: false\nrun_seed: 7\n",
    ],
    ids=["flat", "nested", "dotted", "dashes"],
)
def test_a_file_may_hold_groups(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert sizes("--config", str(tmp_path / "a.yaml")) == (64, False, 4, True, 7)
    assert sizes("--config", str(tmp_path / "a.yaml"), "--student-hidden", "6") == (64, False, 6, True, 7)


def test_a_flat_name_does_not_reach_into_a_prefixed_group() -> None:
    assert codes(lambda: sizes("--hidden", "4")) == [
        ("option.unknown", "rft-train pair --help")
    ]  # two of them are as near


def test_two_forms_with_two_values_are_refused() -> None:
    assert codes(lambda: sizes("--seed", "1", "--run-seed", "2")) == [("option.given_twice", "leave --run-seed out")]
    assert codes(lambda: sizes("--teacher.tied", "true", "--no-teacher-tied"))[0][0] == "option.given_twice"
    assert sizes("--seed", "1", "--run-seed", "1")[-1] == 1
    assert sizes("--seed", "1", "--seed", "2")[-1] == 2


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("seed: 1\nrun: {seed: 2}\n", "file.duplicate", 2),
        ("run:\n  seed: 1\nrun.seed: 2\n", "file.duplicate", 3),
        ("run:\n  seed: {a: 1}\n", "file.nested", 2),
        ("runs: {seed: 1}\n", "file.nested", 1),
        ("run: {hidden: 1}\n", "option.unknown", 1),
        ("student: {hidden: 1}\n", "option.value", 1),
    ],
)
def test_what_a_file_with_groups_may_not_hold(tmp_path: Path, text: str, code: str, line: int) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        sizes("--config", str(tmp_path / "a.yaml"))
    assert [(problem.code, problem.where.endswith(f"a.yaml:{line}")) for problem in caught.value.problems] == [
        (code, True)
    ]


def test_what_is_printed_is_read_back(tmp_path: Path) -> None:
    resolved = resolve("pair", ["--student-hidden", "4", "--no-teacher-tied"])
    (tmp_path / "config.yaml").write_text(resolved.config_yaml)
    again = resolve("pair", ["--config", str(tmp_path / "config.yaml")])
    assert again.settings == resolved.settings
    assert again.origins["student_hidden"].line


def test_help_shows_both_groups(capsys: pytest.CaptureFixture[str]) -> None:
    print_help("pair", ["--help-all"])
    page = capsys.readouterr().out
    assert "--teacher_hidden INT of at least 2" in page
    assert "--student_tied, --no_student_tied" in page
    print_help("pair", ["--help"])
    page = capsys.readouterr().out
    assert "--student_tied" in page
    assert "--teacher_tied" not in page


@pytest.mark.parametrize("command", discovery.with_settings())
def test_no_full_name_of_a_setting_is_the_name_of_another(command: str) -> None:
    table = schema(command)
    full = [(name, setting.name) for setting in table.values() for name in setting.full_names]
    assert [(name, owner) for name, owner in full if name in table and name != owner] == []
    assert len({name for name, _ in full}) == 2 * len(table)
