"""The table: a row a detector, each with a metric that is documented and a setting that there is."""

from __future__ import annotations

from pathlib import Path
from string import Formatter

import pytest

from rft_trainer.health.detector import Detector
from rft_trainer.health.detectors import DETECTORS
from rft_trainer.health.history import LAST
from rft_trainer.metrics.memory_growth import SLOW_STEPS

DOCS = Path(__file__).parents[4] / "docs"


def test_every_name_is_one_detector() -> None:
    names = [detector.name for detector in DETECTORS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda one: one.name)
def test_a_row_can_be_read(detector: Detector) -> None:
    # rows are kept for a while, and each rank keeps its memory for longer
    assert 1 <= detector.window <= (SLOW_STEPS if detector.metrics.startswith("memory/slow_growth") else LAST)
    assert detector.metrics.split()
    fields = {field for _, field, _, _ in Formatter().parse(detector.says) if field}
    assert fields <= {"value", "detail", "window", "threshold"}
    # a remedy of its own, or one that the verdict computes
    assert detector.do or detector.says == "{detail}"
    page = (DOCS / "metrics.md").read_text()
    assert all(f"`{name}`" in page for name in detector.metrics.split())
    assert f"| `{detector.name}` | {detector.level} |" in (DOCS / "health.md").read_text()
