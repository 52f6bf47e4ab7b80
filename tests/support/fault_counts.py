"""How many faults a test draws: a few in the test command, the counts of docs/reliability.md at night."""

from __future__ import annotations

import os

import pytest


def counted(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrise `number`: `few` cases, and as "night" the part of `many` that RFT_NIGHT_SHARE says (all of them)."""
    share = float(os.environ.get("RFT_NIGHT_SHARE", "1"))
    night = [pytest.mark.night, pytest.mark.timeout(6 * 3600)]
    return pytest.mark.parametrize(
        "number", [pytest.param(few, id="few"), pytest.param(max(1, round(many * share)), marks=night, id="night")]
    )
