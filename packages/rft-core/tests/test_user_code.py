"""Import of a user's file: it is a module of this process before it runs, and errors are its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rft_core.user_code import load_module


def test_a_file_is_a_module_that_its_own_code_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "a_reward", None)
    file = tmp_path / "reward.py"
    file.write_text("import sys\nIS_KNOWN = sys.modules[__name__].__file__ == __file__\nclass Kind: ...\n")
    module = load_module(file, "a_reward")
    assert module.IS_KNOWN
    assert module.Kind.__module__ == "a_reward"
    file.write_text("class Other: ...\n# another length\n")
    assert not hasattr(load_module(file, "a_reward"), "Kind"), "it was read again"


def test_neighbours_are_imported_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "a_user", None)
    (tmp_path / "beside_a_user.py").write_text("VALUE = 3\n")
    file = tmp_path / "user.py"
    file.write_text("from beside_a_user import VALUE\n")
    with pytest.raises(ModuleNotFoundError):
        load_module(file, "a_user")
    assert load_module(file, "a_user", with_neighbours=True).VALUE == 3
    sys.modules.pop("beside_a_user")


def test_what_is_no_python_file_is_refused_and_errors_are_those_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.py"):
        load_module(tmp_path / "reward.txt", "a_text")
    assert "a_text" not in sys.modules
    (tmp_path / "fails.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_module(tmp_path / "fails.py", "a_failure")
    sys.modules.pop("a_failure")
