from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3
