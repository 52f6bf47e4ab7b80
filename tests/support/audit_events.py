"""Events of the interpreter's audit hooks, counted while a block runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted_events(seen: Counter[str], events: Collection[str]) -> Iterator[None]:
    """Count the events of these names into `seen`."""
    active = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active[0] and event in events:
            seen[event] += 1

    sys.addaudithook(hook)  # a hook cannot be taken away again
    try:
        yield
    finally:
        active[0] = False
