"""What the reader of files of settings gives: settings, header, stages, and a problem for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.schema import Setting
from rft.config.yaml_file import LARGEST, FileSettings, read

ROWS = [Setting(name, "group", kind, None, {}) for name, kind in (("size", int), ("fast", bool), ("pair", tuple))]
SCHEMA = {setting.name: setting for setting in ROWS}


def file_of(text: str | bytes, **options: Any) -> FileSettings:
    Path("a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(Path("a.yaml"), SCHEMA, **options)


def problems(text: str | bytes) -> list[tuple[str, str, str]]:
    return [(problem.code, problem.where, problem.do) for problem in file_of(text).problems]


def test_every_entry_is_a_setting_with_its_line_and_its_text() -> None:
    text = "# first\nsize: 4\n\nno-fast: yes\n--pair: [1, 2]\nother: null\nname: !!str null\nday: 2026-11-20\n"
    file = file_of(text)
    assert [(one.written, one.name, one.texts, one.is_null) for one in file.options] == [
        ("size", "size", ("4",), False),
        ("no-fast", "fast", ("false",), False),
        ("--pair", "pair", ("1", "2"), False),
        ("other", "other", ("none",), True),
        ("name", "name", ("null",), False),
        ("day", "day", ("2026-11-20",), False),
    ]
    assert [(one.origin.line, one.origin.text) for one in file.options] == [
        *((2, "4"), (4, "yes"), (5, "1, 2"), (6, "null"), (7, "null"), (8, "2026-11-20"))
    ]
    assert {(one.origin.kind, one.origin.file) for one in file.options} == {("file", "a.yaml")}
    assert (file.header, file.stages, file.problems) == ({}, [], [])


def test_the_kind_of_the_file_is_that_of_its_origins_and_problems() -> None:
    file = file_of("size: 4\nfast: !secret x\n", kind="recipe")
    assert file.options[0].origin.kind == "recipe"
    assert file.problems[0].where == "recipe a.yaml:2"


def test_a_header_has_fields_and_stages() -> None:
    file = file_of(
        "recipe:\n  task: sums\n  minutes: 2\n  parts: [a, b]\n  more: {a: b}\n"
        "  stages:\n    - name: one\n      run: sft --seed 1\n    - not a stage\n    - {name: two, run: [a]}\n"
        "  other: [{name: three}]\nsize: 1\n"
    )
    assert file.header == {"task": "sums", "minutes": "2"}
    assert file.stages == [{"name": "one", "run": "sft --seed 1"}, {"name": "two", "run": ""}]
    assert [one.name for one in file.options] == ["size"]
    assert file.problems == []


def test_a_header_that_is_one_value_is_a_setting_like_any_other() -> None:
    assert [(one.name, one.texts) for one in file_of("recipe: sums\n").options] == [("recipe", ("sums",))]


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_has_nothing(text: str) -> None:
    assert file_of(text) == FileSettings()


@pytest.mark.parametrize(
    ("text", "code", "where", "do"),
    [
        ("- a\n- b\n", "not_settings", ":1", "seed: 42"),
        ("\njust text\n", "not_settings", ":2", "seed: 42"),
        ("size: 1\n? [a]\n: 1\n", "name", ":2", "seed: 42"),
        ("size: 1\nfast: 1\nsize: 2\n", "duplicate", ":3", "keep one of the two lines"),
        ("fast: 1\nno_fast: 1\n", "duplicate", ":2", "keep one of the two lines"),
        ("size: 1\nname: !secret x\n", "tag", ":2", "name: VALUE"),
        ("name: !!python/name:os.system\n", "tag", ":1", "name: VALUE"),
        ("model:\n  size: 4\n  fast: 1\n", "nested", ":2", "size: VALUE"),
        ("model: {}\n", "nested", ":1", "name: VALUE"),
        ("model: {[a]: 4}\n", "nested", ":1", "name: VALUE"),
        ("size: [1, [2]]\n", "nested", ":1", "name: VALUE"),
        ("size: [1, !secret x]\n", "nested", ":1", "name: VALUE"),
        ("size: [{a: 1}]\n", "nested", ":1", "name: VALUE"),
        ("size: 1\n- 3\n", "yaml", ":2", "write one `name: value` a line"),
        ("size: 'a\n", "yaml", ":2", "write one `name: value` a line"),
        ("a: \x00\n", "yaml", "", "write one `name: value` a line"),
        (b"size: \xff\n", "encoding", "", "save it as UTF-8"),
        pytest.param("[" * 3000, "nested", "", "flatten it", id="3000 brackets"),
        ("#" * (LARGEST + 1), "large", "", "check the path"),
    ],
)
def test_what_is_no_setting_is_one_problem_with_its_line(text: str | bytes, code: str, where: str, do: str) -> None:
    assert problems(text) == [(f"file.{code}", f"a.yaml{where}", do)]


def test_the_largest_file_is_read_and_a_folder_is_not() -> None:
    assert LARGEST == 1_000_000
    assert problems("size: 1\n#".ljust(LARGEST, "x")) == []
    Path("folder").mkdir()
    assert [problem.code for problem in read(Path("folder"), SCHEMA).problems] == ["file.read"]
    assert [problem.code for problem in read(Path("absent.yaml"), SCHEMA).problems] == ["file.read"]


def test_the_entries_after_a_problem_are_read_as_well() -> None:
    file = file_of("model: {a: 1}\nsize: 1\n? [b]\n: 2\nfast: 1\n")
    assert [one.name for one in file.options] == ["size", "fast"]
    assert [problem.where for problem in file.problems] == ["a.yaml:1", "a.yaml:3"]
