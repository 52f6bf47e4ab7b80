"""An algorithm in a file of a person's own: what the documentation shows is the file, and its numbers train."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.compare import differing_tensors, tensors
from support.trainer_task import TrainerTask

from rft_cli.config.resolve import resolve
from rft_cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_algorithm.py"
PAGE = (ROOT / "docs" / "custom-algorithm.md").read_text()

pytestmark = pytest.mark.xdist_group("custom_algorithm")


def block(name: str, end: str) -> str:
    """The code between two marks of the page."""
    (found,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- {end} -->", PAGE, flags=re.S)
    return found


def test_the_page_shows_the_example_as_it_is() -> None:
    assert block("file: examples/my_algorithm.py", "end of file") == EXAMPLE.read_text()


def run_the_test_of_the_page(source: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every case of the page's test on an algorithm file; the number of cases."""
    module = types.ModuleType("my_algorithm")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "my_algorithm.py", "exec"), module.__dict__)
    scope: dict[str, Any] = {}
    exec(compile(block("checked: test", "end of test"), "test_my_algorithm.py", "exec"), scope)
    (test,) = [value for name, value in scope.items() if name.startswith("test_")]
    (mark,) = test.pytestmark
    names, cases = mark.args
    for case in cases:
        test(**dict(zip(names, case, strict=True)))
    return len(cases)


def test_the_test_of_the_page_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_the_test_of_the_page(EXAMPLE.read_text(), monkeypatch) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tokens.advantages * change > 0", "tokens.advantages * change < 0"),
        ("torch.tanh(change / reach)", "torch.tanh(change)"),
        ("-tokens.advantages * (1.0", "tokens.advantages * (1.0"),
    ],
)
def test_a_wrong_equation_fails_the_test_of_the_page(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = EXAMPLE.read_text().replace(old, new)
    assert wrong != EXAMPLE.read_text()
    with pytest.raises(AssertionError):
        run_the_test_of_the_page(wrong, monkeypatch)


@pytest.fixture(scope="module")
def run(trainer_task: TrainerTask) -> Callable[..., Path]:
    """Three steps of two passes each, with some more flags; the run's directory."""

    def start(name: str, *more: str, algorithm: str = f"{EXAMPLE}:TanhClip") -> Path:
        words = [*trainer_task.words(), "--advantage_estimator", algorithm, "--max_epochs", "2", *more]
        assert main(["rl", *words, "--save_path", str(trainer_task.folder / name)]) == 0
        return trainer_task.folder / name

    return start


def test_the_numbers_of_the_algorithm_change_the_weights(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    as_written = run("as_written")
    told = capsys.readouterr().out
    assert "tanh_clip" in told
    assert "TanhShoulder(low 0.2, high 0.2)" in told
    weights = {
        "the same numbers, given": run("given", "--eps_clip", "0.2", "--eps_clip_high", "0.2"),
        "a narrower bound": run("narrow", "--eps_clip", "0.02"),
        "narrower above alone": run("above", "--eps_clip", "0.2", "--eps_clip_high", "0.02"),
        "PPO's clip instead": run("ppo", "--policy_loss", "ppo"),
    }
    models = {name: tensors(path, "model/model.safetensors") for name, path in weights.items()}
    base = tensors(as_written, "model/model.safetensors")
    assert differing_tensors(models.pop("the same numbers, given"), base) == []
    for name, model in models.items():
        assert len(differing_tensors(model, base)) > len(base) // 2, name


def test_a_run_of_the_algorithm_is_continued_to_the_bit(run: Callable[..., Path], trainer_task: TrainerTask) -> None:
    whole = run("whole")
    part = run("part", "--max_steps", "2", "--lr_schedule", "constant")
    assert main(["resume", str(part), "--max_steps", "3"]) == 0
    assert differing_tensors(tensors(part, "model/model.safetensors"), tensors(whole, "model/model.safetensors")) == []


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("absent.py:TanhClip", "algorithm.file_missing", "absent.py is not a Python file"),
        (f"{EXAMPLE}:TanhShoulder", "algorithm.class_missing", "it has: TanhClip"),
        (f"{EXAMPLE}:Absent", "algorithm.class_missing", "no subclass of PolicyAlgorithm called Absent"),
    ],
)
def test_what_is_no_algorithm_is_refused_before_anything_starts(
    place: str, code: str, told: str, trainer_task: TrainerTask, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trainer_task.folder / "refused"
    words = [*trainer_task.words(), "--advantage_estimator", place, "--save_path", str(path)]
    assert main(["rl", *words, "--json_errors"]) == 2
    shown = capsys.readouterr().err
    assert f'"{code}"' in shown
    assert told in shown
    assert not path.exists()


def test_the_commands_of_the_page_name_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^rft-train rl (.*?[^\\])$", PAGE, flags=re.S | re.M)
    settings = resolve("rl", command.replace("\\\n", " ").split()).settings
    assert settings.algorithm.advantage_estimator == "examples/my_algorithm.py:TanhClip"
    assert settings.batch.max_epochs == 2
