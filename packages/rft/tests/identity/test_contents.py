"""What a run names: which contents are recorded under which names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.identity.contents import SETTING_OF, records_content, rows_content, run_contents
from rft_trainer.settings.rewards import RewardSettings

ROWS = rows_content("ab", 1200, "train.jsonl")
NOTHING = {"environment": "", "advantage_estimator": "", "model_code": "", "judge_template": "", "critic_pretrain": ""}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Paths of a model, of code and of a template."""
    for name in ("m/config.json", "c/config.json", "code.py", "judge.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return {name: str(tmp_path / name) for name in ("m", "c", "code.py", "judge.txt")}


def resolved(reward: str = "", **values: Any) -> Any:
    """Settings of `rl`, or of `sft` without `reward`."""
    groups = SimpleNamespace(reward_pretrain=values.get("reward_pretrain", ""), remote_rm_url="")
    judge = SimpleNamespace(judge_pretrain=values.get("judge_pretrain", ""), judge_url="")
    settings = SimpleNamespace(reward=RewardSettings(reward=reward), reward_models=groups, judge=judge)
    return SimpleNamespace(values={**NOTHING, **values}, settings=settings)


def test_a_supervised_run_has_rows_and_a_model(files: dict[str, str]) -> None:
    contents = run_contents(resolved(pretrain=files["m"]), ROWS, None)
    assert set(contents) == {"prompt_data", *SETTING_OF}
    assert contents["prompt_data"].covers == "1,200 rows in use"


def test_everything_that_is_named_is_in_it(files: dict[str, str]) -> None:
    own = f"{files['code.py']}:f"
    given = resolved(
        reward=own,
        pretrain=files["m"],
        environment=own,
        advantage_estimator="rloo",
        model_code=files["code.py"],
        judge_template=files["judge.txt"],
        json_schema=files["judge.txt"],
        critic_pretrain=files["c"],
        judge_pretrain=files["c"],
        reward_pretrain=f"a={files['c']},b={files['m']}",
    )
    given.values["reward"] = own
    contents = run_contents(given, ROWS, records_content([[1]], "held"), {"compute_advantages": len})
    names = "prompt_data eval_data model tokenizer weights reward environment advantage_estimator model_code"
    names += " judge_template json_schema critic_pretrain judge_pretrain reward_pretrain compute_advantages"
    assert set(contents) == set(names.split())
    assert {name for name, content in contents.items() if content.digest == "absent"} == {"tokenizer", "weights"}


def test_a_reward_that_nobody_names_is_the_built_in_one(files: dict[str, str]) -> None:
    given = resolved(pretrain=files["m"])
    given.values["reward"] = ""
    assert run_contents(given, ROWS, None)["reward"].covers == "exact (built in)"


def test_several_rewards_are_one_content_in_their_order(files: dict[str, str]) -> None:
    found = {}
    for name in ("math,exact", "exact,math", f"math,{files['code.py']}:f"):
        given = resolved(reward=name, pretrain=files["m"])
        given.values["reward"] = name
        found[name] = run_contents(given, ROWS, None)["reward"]
    assert len({content.digest for content in found.values()}) == 3
    assert found["math,exact"].covers == "math (built in); exact (built in)"


def test_models_of_a_reward_count_with_their_names(files: dict[str, str]) -> None:
    digests = [
        run_contents(resolved(pretrain=files["m"], reward_pretrain=text), ROWS, None)["reward_pretrain"].digest
        for text in (f"a={files['c']}", f"b={files['c']}", f"a={files['m']}", "a=none")
    ]
    assert len(set(digests)) == 4
    assert digests[-1] == "absent"


def test_rows_count_in_their_order() -> None:
    first, second = records_content([[1], [2]], "held"), records_content([[2], [1]], "held")
    assert first is not None
    assert second is not None
    assert (first.count, first.place, first.digest == second.digest) == (2, "held", False)
    assert records_content([], "held") is None
