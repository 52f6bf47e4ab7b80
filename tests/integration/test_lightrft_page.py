"""The page for those who come from LightRFT: its names are there, its examples run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.trainer_task import TrainerTask

from rft_cli.lightrft.trainer import SPMDPPOTrainer, Strategy, TrajectorySaver

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-lightrft.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
(TABLE,) = re.findall(r"<!-- names of lightrft -->\n(.*?)\n<!-- end of names -->", PAGE, flags=re.S)

pytestmark = [pytest.mark.xdist_group("lightrft_api"), pytest.mark.usefixtures("script")]


def test_every_name_of_the_table_can_be_imported() -> None:
    places = re.findall(r"`(rft_\w+(?:\.\w+)+)`", PAGE)
    assert len(places) >= 5
    for place in places:
        module, _, name = place.rpartition(".")
        assert hasattr(importlib.import_module(module), name) or importlib.import_module(place), place


@pytest.mark.parametrize(
    "name",
    [
        "SPMDPPOTrainer",
        "fit",
        "ppo_train",
        "compute_advantages",
        "actor",
        "strategy",
        "update_engine_weights",
        "gather_and_generate",
        "TrajectorySaver",
    ],
)
def test_every_name_of_the_guides_is_in_the_table_and_there(name: str) -> None:
    assert re.search(rf"^\| `[^`]*{name}", TABLE, flags=re.M), name
    assert any(hasattr(owner, name) or owner.__name__ == name for owner in (SPMDPPOTrainer, Strategy, TrajectorySaver))


def run_on(code: str, task: TrainerTask, scope: dict[str, object]) -> None:
    """The code with the settings of the small task in the place of the page's model and data."""
    keys = re.findall(r"^ +(\w+)=", code, flags=re.M)
    settings = {
        k: v for k, v in task.settings.items() if k not in keys or k in ("pretrain", "prompt_data", "eval_data")
    }
    code = re.sub(r'pretrain="MODEL",\s*prompt_data="train.jsonl"(,\s*eval_data="test.jsonl")?', "**SETTINGS", code)
    assert "MODEL" not in code
    exec(compile(code, "page.py", "exec"), scope | {"SETTINGS": settings, "__name__": "__main__"})


def test_the_first_example_trains(trainer_task: TrainerTask, capsys: pytest.CaptureFixture[str]) -> None:
    run_on(CODE[0], trainer_task, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("runs/custom {")
    assert Path("runs/custom/summary.json").is_file()


def test_the_other_examples_run(trainer_task: TrainerTask) -> None:
    def custom_reward_fn(responses: list[str], labels: list[str]) -> list[float]:
        return [float(len(response)) for response in responses]

    scope = {"SPMDPPOTrainer": SPMDPPOTrainer, "custom_reward_fn": custom_reward_fn}
    by_hand, saving = (next(code for code in CODE if word in code) for word in ("metrics = ", "saver.save"))
    run_on(by_hand.replace("12+30=", "1+1="), trainer_task, scope)
    run_on(saving, trainer_task, scope)
    assert Path("trajectories/step_000001.jsonl").is_file()
