"""Reward function of an installed package; this module's `load` runs in a scoring process."""

from __future__ import annotations

from rft_trainer.installed_tasks.discovery import function
from rft_trainer.workers.user_file import RewardHandler


def load(module: str, name: str) -> RewardHandler:
    """Import the function `name` of an installed module and return its handler, as `user_file.load` does.

    Raises:
        OptionsError: a class. What its module raises while it is imported is not caught; the pool makes a `DataError`
            of it.
    """
    return RewardHandler(function(f"{module}:{name}"), module, name, keeps_errors=True)
