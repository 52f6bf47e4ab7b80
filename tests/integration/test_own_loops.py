"""Examples and notebooks of loops of one's own: they are run, they learn, and the pages show them as they are."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = {"own_grpo": "own-loops", "own_dpo": "own-dpo", "own_objective": "own-objective"}
NOTEBOOKS = ("own_grpo", "own_objective")

pytestmark = pytest.mark.xdist_group("own_loops")


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_example_as_it_is(name: str) -> None:
    page = (ROOT / "docs" / f"{PAGES[name]}.md").read_text()
    (shown,) = re.findall(rf"<!-- file: examples/{name}.py -->\n```python\n(.*?)```\n<!-- end of file -->", page, re.S)
    assert shown == (EXAMPLES / f"{name}.py").read_text()


def test_the_example_of_grpo_raises_the_reward(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = example("own_grpo").main(8)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    saved = Path(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved: "))
    assert (saved / "model" / "model.safetensors").is_file()


def test_the_example_of_dpo_puts_pairs_in_order() -> None:
    accuracies = example("own_dpo").main(2)
    assert accuracies[0] == 0.0, "policy and reference are the same before the first step"
    assert sum(accuracies[-3:]) / 3 >= 0.7


def test_the_odd_objective_learns_and_unlearns() -> None:
    learned, unlearned = example("own_objective").main(25)
    assert learned > -1.6
    assert unlearned < -4.0


@pytest.mark.full
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("name", PAGES)
def test_an_example_runs_on_two_ranks_as_it_is(name: str) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(EXAMPLES / f"{name}.py"), "2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = [line.removeprefix("saved: ") for line in done.stdout.splitlines() if line.startswith("saved: ")]
    assert all((Path(path) / "model" / "model.safetensors").is_file() for path in saved)
    assert len(saved) == (name != "own_objective"), "rank 0 alone prints"


def cells(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook, which must be one of format 4.5 without results of an earlier run."""
    book = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    found = book["cells"]
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_its_first_cell_to_its_last(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    run: Callable[..., None] = exec
    for number, cell in enumerate(cells(name)):
        if cell["cell_type"] == "code":
            run(compile("".join(cell["source"]), f"{name}.ipynb[{number}]", "exec"), scope)
    assert capsys.readouterr().out
