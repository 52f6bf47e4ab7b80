"""Origins of values, as they are told."""

from __future__ import annotations

import pytest

from rft.resolved import Origin


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (Origin("default"), "default"),
        (Origin("command line", text="3"), "command line"),
        (Origin("file", "c.yaml", 4), "c.yaml:4"),
        (Origin("file", "c.yaml"), "c.yaml"),
        (Origin("recipe", "grpo.yaml", 4), "recipe grpo.yaml:4"),
    ],
)
def test_an_origin_is_told_by_file_and_line(origin: Origin, told: str) -> None:
    assert str(origin) == told
