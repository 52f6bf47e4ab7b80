"""Reward function of an installed package; this module's `load` runs in a scoring process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rft_trainer.installed_tasks.discovery import function
from rft_trainer.workers.user_file import handler_of


def load(module: str, name: str) -> Callable[[Mapping[str, object]], object]:
    """Import the function `name` of an installed module and return its handler, as `user_file.load` does.

    Raises:
        OptionsError: a signature that cannot be called. What its module raises while it is imported is not caught; the
            pool makes a `DataError` of it.
    """
    return handler_of(function(f"{module}:{name}"), module, name)
