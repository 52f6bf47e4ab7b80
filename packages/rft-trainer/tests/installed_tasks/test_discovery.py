"""Tasks of installed packages: found by name, and refused by name where they cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.sources import files_of, parse_sources, rows_of
from rft_trainer.data.task_rows import is_task
from rft_trainer.installed_tasks.discovery import find_task, listed_tasks, refuse_built_in, task_names
from rft_trainer.rewards.registry import reward_by_name

SOURCE = """
from rft_trainer.installed_tasks.record import InstalledTask
COUNT = InstalledTask(name="count", rows="{module}:rows")
SCORE = InstalledTask(name="score", reward="{module}:score")
NUMBER = 3
def rows(argument):
    if argument == "text":
        return ["a text"]
    return [{"input": str(n)} for n in range(int(argument))]
"""

Install = Callable[..., None]


BEFORE = task_names()
"""Tasks of the packages that are installed where the tests run."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write what an installation leaves: a module, and the entry points of its package."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modules: list[str] = []

    def write(rows: str, *, source: str = SOURCE, module: str = "a_package") -> None:
        (tmp_path / f"{module}.py").write_text(source.replace("{module}", module))
        facts = tmp_path / f"{module}-1.0.dist-info"
        facts.mkdir()
        name = module.replace("_", "-")
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[rft.tasks]\n{rows}\n")
        modules.append(module)

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def test_rows_of_a_task_stand_where_a_file_would(install: Install) -> None:
    install("count = a_package:COUNT")
    assert [name for name in task_names() if name not in BEFORE] == ["count"]
    [spec] = parse_sources("count:2")
    assert (spec.name, spec.place) == ("count:2", "count:2 (a task of a-package 1.0)")
    assert [(row.fields, row.where()) for row in rows_of("count:2")] == [
        ({"input": "0"}, "count:2:1"),
        ({"input": "1"}, "count:2:2"),
    ]
    assert files_of("count:2") == ["count:2"]
    assert [spec.name for spec in parse_sources("count:2,count:1.5,a/train.jsonl")] == ["count:2", "count:1.5", "train"]
    assert not is_task("count")


@pytest.mark.parametrize(
    ("rows", "source", "code", "what"),
    [
        ("count = a_package:COUNT", "1 / 0", "task.unusable", "ZeroDivisionError: division by zero"),
        ("count = a_package:MISSING", SOURCE, "task.unusable", "AttributeError"),
        ("count = not_there:COUNT", SOURCE, "task.unusable", "ModuleNotFoundError"),
        ("count = a_package:NUMBER", SOURCE, "task.unusable", "a_package:NUMBER is of type int"),
        ("count = a_package:SCORE", SOURCE, "task.unusable", "a_package:SCORE is the record of a task score"),
    ],
    ids=["import", "attribute", "module", "kind", "name"],
)
def test_a_record_that_cannot_be_used_is_listed_and_fails_only_what_names_it(
    rows: str, source: str, code: str, what: str, install: Install
) -> None:
    install(rows, source=source)
    install(
        "other = another:OTHER", source=SOURCE.replace("COUNT", "OTHER").replace("count", "other"), module="another"
    )
    [(name, about), other] = [task for task in listed_tasks() if task[0] not in BEFORE]
    assert name == "count"
    assert about.startswith("cannot be used: ")
    assert about.endswith("(a-package 1.0)")
    assert what in about
    assert other == ("other", "rows (another 1.0)")
    assert len(rows_of("other:3")) == 3
    with pytest.raises(OptionsError) as caught:
        rows_of("count:2")
    assert caught.value.problem.code == code
    assert what in caught.value.problem.what
    assert "entry point count = " in caught.value.problem.where
    assert "a-package 1.0" in caught.value.problem.where


def test_a_name_of_two_packages_is_refused_with_both(install: Install) -> None:
    install("count = a_package:COUNT")
    install("count = another:COUNT", module="another")
    with pytest.raises(OptionsError) as caught:
        find_task("count", flag="--prompt_data", part="rows")
    assert caught.value.problem.code == "task.name_clash"
    assert "a-package 1.0" in caught.value.problem.where
    assert "another 1.0" in caught.value.problem.where
    assert [about.partition(":")[0] for name, about in listed_tasks() if name not in BEFORE] == [
        "cannot be used",
        "cannot be used",
    ]


def test_a_task_is_refused_under_the_name_of_a_built_in_reward_alone(install: Install) -> None:
    install("math = a_package:MATH", source=SOURCE.replace("COUNT", "MATH").replace('"count"', '"math"'))
    refuse_built_in("exact", ("exact", "math"), flag="--reward")
    with pytest.raises(OptionsError) as caught:
        refuse_built_in("math", ("exact", "math"), flag="--reward")
    assert caught.value.problem.code == "task.name_clash"
    assert "a-package 1.0" in caught.value.problem.where


def test_a_part_that_it_lacks_is_refused(install: Install) -> None:
    install("count = a_package:COUNT")
    with pytest.raises(OptionsError) as caught:
        reward_by_name("count")
    assert caught.value.problem.code == "task.no_part"
    assert caught.value.problem.where.startswith("--reward; entry point count = a_package:COUNT")


@pytest.mark.parametrize(
    ("argument", "what"),
    [("many", "ValueError"), ("0", "gave nothing"), ("text", "row 1 of a_package:rows is 'a text'")],
)
def test_rows_that_are_none_are_refused_with_the_package(argument: str, what: str, install: Install) -> None:
    install("count = a_package:COUNT")
    with pytest.raises(DataError) as caught:
        rows_of(f"count:{argument}")
    assert caught.value.problem.code == "task.rows"
    assert what in caught.value.problem.what
    assert "a-package 1.0" in caught.value.problem.where


def test_a_file_of_this_name_is_refused_and_an_unknown_task_named(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("count = a_package:COUNT")
    monkeypatch.chdir(tmp_path)
    for path, code in (("count:2", "task.file_of_this_name"), ("cuont:2", "task.unknown")):
        if path == "count:2":
            (tmp_path / path).touch()
        with pytest.raises(OptionsError) as caught:
            rows_of(path)
        assert caught.value.problem.code == code
    assert caught.value.problem.do == "count:2 in its place"
    with pytest.raises(DataError) as missing:
        rows_of("train.jsonl")
    assert missing.value.problem.code == "data.not_found"


def test_a_reward_that_is_not_there_is_refused_with_the_package(install: Install) -> None:
    install("score = a_package:SCORE")
    with pytest.raises(DataError) as caught:
        reward_by_name("score")
    assert caught.value.problem.code == "reward.import"
    assert "has no attribute 'score'" in caught.value.problem.what
    assert "entry point score = a_package:SCORE of a-package 1.0" in caught.value.problem.where
    with pytest.raises(OptionsError) as unknown:
        reward_by_name("scroe")
    assert unknown.value.problem.do == "--reward score"
