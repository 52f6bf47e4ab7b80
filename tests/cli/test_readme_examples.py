"""The examples in the READMEs of the packages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOLD = {
    "rft-trainer": ["234 optimizer steps", "1.0 ok", "None unparsable"],
    "rft-cli": ["64 recipe", "7 command line", "exit code 2"],
}


@pytest.mark.parametrize("package", TOLD)
def test_the_example_of_a_package_runs(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.excepthook", None)
    readme = (ROOT / "packages" / package / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    exec(compile(example, f"{package}/README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert [part for part in TOLD[package] if part not in shown] == []


def test_the_reward_of_the_examples_scores_as_it_says() -> None:
    scope: dict[str, object] = {}
    path = ROOT / "examples" / "my_reward.py"
    exec(compile(path.read_text(), str(path), "exec"), scope)
    reward, finished = scope["reward_fn"], scope["finished_only"]
    assert callable(reward)
    assert callable(finished)
    assert reward(["42", "it is 42", "7"], ["42", "42", "42"]) == pytest.approx([1.0, 0.4, 0.0])
    assert finished(["42", "42"], ["42", "42"], finish_reasons=["stop", "length"]) == [1.0, None]
