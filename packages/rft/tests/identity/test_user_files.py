"""Digests of a user's code: of the file, of what it imports beside it, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.identity.user_files import code_content, folder_content, function_content, imported_files, module_file
from rft.library.given_rewards import FunctionRewards
from rft_trainer.rewards.in_process import FunctionReward

MAIN = """import json
import one
from parts import two
from parts.three import x
import numpy
def f(a, b):
    from late import y
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file that imports a module, a package's modules, and a module within a function."""
    (tmp_path / "parts").mkdir()
    texts = {"main.py": MAIN, "one.py": "import deep\nimport main\n", "deep.py": "", "late.py": "", "other.py": ""}
    texts |= {"parts/__init__.py": "", "parts/two.py": "", "parts/three.py": "x = 1", "parts/four.py": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_beside_it_are_followed_and_others_are_not(code: Path) -> None:
    found = [path.relative_to(code).as_posix() for path in imported_files(code / "main.py")]
    assert found == ["deep.py", "late.py", "one.py", "parts/__init__.py", "parts/three.py", "parts/two.py"]


@pytest.mark.parametrize(
    ("file", "changes"),
    [("main.py", True), ("deep.py", True), ("parts/two.py", True), ("late.py", True), ("parts/four.py", False)],
)
def test_a_change_of_what_is_used_changes_the_digest(code: Path, file: str, changes: bool) -> None:
    before = code_content(f"{code}/main.py:f")
    (code / file).write_text((code / file).read_text() + "# more\n")
    assert (code_content(f"{code}/main.py:f").digest != before.digest) is changes
    assert before.covers.startswith("main.py and 6 files with it, with numpy ")
    assert before.place == f"{code}/main.py:f"


def test_another_function_of_the_file_is_another_reward_and_another_place_is_not(code: Path, tmp_path: Path) -> None:
    assert code_content(f"{code}/main.py:f").digest != code_content(f"{code}/main.py:g").digest
    (tmp_path / "moved").mkdir()
    for name in ("late.py", "deep.py"):
        (tmp_path / "moved" / name).write_text((code / name).read_text())
        assert code_content(f"{code}/{name}:f").digest == code_content(f"{tmp_path}/moved/{name}:f").digest


def test_a_name_is_itself(code: Path) -> None:
    assert code_content("exact").digest == code_content("exact").digest != code_content("format").digest
    assert code_content(f"{code}/none.py:f").digest == "absent"


def test_code_that_is_no_python_counts_with_its_bytes(code: Path) -> None:
    (code / "main.py").write_bytes(b"def (\xff")
    before = code_content(f"{code}/main.py:f").digest
    (code / "main.py").write_bytes(b"def (\xfe")
    assert code_content(f"{code}/main.py:f").digest != before


def test_a_folder_of_model_code_is_all_of_its_files(code: Path) -> None:
    both = f"{code / 'parts'},{code / 'one.py'}"
    before = folder_content(both).digest
    for name in ("parts/four.py", "one.py", "deep.py"):
        (code / name).write_text("# other\n")
        after = folder_content(both).digest
        assert (after != before) is (name != "deep.py"), "one.py imports it no more"
        before = after


def test_a_function_of_a_script_is_its_source() -> None:
    def first(responses: list[str], labels: list[str]) -> list[float]:
        return [1.0 for _ in responses]

    def second(responses: list[str], labels: list[str]) -> list[float]:
        return [2.0 for _ in responses]

    class Scorer:
        def __call__(self, responses: list[str], labels: list[str]) -> list[float]:
            return []

    contents = [function_content(one).digest for one in (first, second, Scorer(), len)]
    assert len(set(contents)) == 4
    assert function_content(Scorer()) == function_content(Scorer)
    assert "cannot be read" in function_content(len).covers
    # as the trainer of LightRFT's names gives them: a reward around a function, and a method of its own class
    assert function_content(FunctionReward(first)) == function_content(first)
    assert function_content(Scorer().__call__) == function_content(Scorer)


def test_several_rewards_of_a_script_are_the_source_of_each_of_them() -> None:
    def first(responses: list[str]) -> list[float]:
        return [1.0 for _ in responses]

    def other(responses: list[str]) -> list[float]:
        return [2.0 for _ in responses]

    lists = [FunctionRewards([FunctionReward(first), second]) for second in (FunctionReward(other), "exact", "math")]
    assert len({function_content(one).digest for one in lists}) == 3
    assert "source of" in function_content(lists[1]).covers


def test_a_function_of_a_module_is_its_file_with_what_it_imports_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own_package"
    (folder / "deep").mkdir(parents=True)
    texts = {"__init__.py": "", "words.py": "from own_package.parts import x\nfrom .near import y\n", "parts.py": ""}
    texts |= {"near.py": "", "other.py": "", "deep/__init__.py": "import own_package.parts\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (tmp_path / "json.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for module, file, changes in (
        ("words", "words.py", True),
        ("words", "parts.py", True),
        ("words", "near.py", True),
        ("words", "other.py", False),
        ("deep", "parts.py", True),
    ):
        before = code_content(f"own_package.{module}:f").digest
        (folder / file).write_text((folder / file).read_text() + "# more\n")
        assert (code_content(f"own_package.{module}:f").digest != before) is changes, (module, file)
    assert module_file("json") != (tmp_path / "json.py", tmp_path), "the library comes first"
    assert module_file("no_such_module") is None
    assert module_file("own.py") is None
    assert module_file("in-process") is None
