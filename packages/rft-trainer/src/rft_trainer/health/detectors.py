"""The table of detectors, in the order of docs/health.md."""

from __future__ import annotations

from rft_trainer.health.reward_detectors import RESPONSES, REWARDS
from rft_trainer.health.training_detectors import ENGINE, MACHINE, UPDATES

DETECTORS = (*REWARDS, *RESPONSES, *UPDATES, *ENGINE, *MACHINE)
"""Each of another name."""
