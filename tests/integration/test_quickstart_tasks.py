"""The quickstarts with an environment, whole: what they are documented to learn is learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_cli.main import main


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "least"), [("calculator", 0.6), ("guess-number", 0.75)])
def test_conversations_are_learned(task: str, least: float, tmp_path: Path) -> None:
    assert main(["quickstart", "--task", task, "--seed", "0", "--save_path", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    assert found["before"]["accuracy"] < 0.5
    assert found["after"]["accuracy"] > least
