from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import call_payload

from rft_core.errors import OptionsError
from rft_trainer.workers.module_function import load


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of the working directory, forgotten afterwards."""
    folder = tmp_path / "own_rewards"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "words.py").write_text(
        "from .parts import ONE\ndef f(responses, labels): return [ONE for _ in responses]\n"
    )
    (folder / "parts.py").write_text("ONE = 0.5\n")
    (folder / "broken.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_of_the_working_directory_is_imported_with_its_package() -> None:
    assert load("own_rewards.words", "f")(call_payload("a", "b")) == [0.5, 0.5]
    assert sys.path[-1] == str(Path.cwd()), "last, so that it hides no library"


@pytest.mark.parametrize(
    ("module", "remedy"),
    [("own_rewards.word", "--reward own_rewards.words:f"), ("own_reward.words", "PYTHONPATH"), ("zzz", "PYTHONPATH")],
)
def test_a_module_that_is_not_there_is_refused(module: str, remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        load(module, "f")
    assert caught.value.problem.code == "reward.module_missing"
    assert caught.value.problem.do.startswith(remedy)


def test_what_a_module_misses_itself_is_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load("own_rewards.broken", "f")
    with pytest.raises(OptionsError) as caught:
        load("own_rewards.words", "g")
    assert caught.value.problem.code == "reward.function_missing"
