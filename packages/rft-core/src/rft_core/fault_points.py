"""Named instants at which a test may kill the process or fail an operation.

Every place that touches the disk, another process or another rank calls `fault_point` with a
declared name. Without a hook the call costs one comparison. Tests install a hook; nothing is
mocked, so what is tested is the code that runs in production.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

_hook: Callable[[str], None] | None = None
_declared: dict[str, str] = {}


def declare(name: str, meaning: str) -> str:
    """Register a point at import time and give its name back; a second declaration is a bug."""
    assert name not in _declared, f"fault point {name!r} is declared twice"
    _declared[name] = meaning
    return name


class Operation:
    """A context between two fault points: the instants before and after what it encloses.

    The point after is passed only where nothing was raised.
    """

    def __init__(self, name: str, meaning: str) -> None:
        """Declare "<name>.before" and "<name>.after"; `meaning` completes "about to ..."."""
        self.before = declare(f"{name}.before", f"about to {meaning}")
        self.after = declare(f"{name}.after", f"finished: {meaning}")

    def __enter__(self) -> None:
        fault_point(self.before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            fault_point(self.after)


def declared() -> dict[str, str]:
    """Every point of the modules imported so far, with its meaning."""
    return dict(_declared)


def install(hook: Callable[[str], None] | None) -> None:
    """Call `hook(name)` at every point from now on; `None` removes it."""
    global _hook
    _hook = hook


def fault_point(name: str) -> None:
    """Mark the instant `name`; does nothing unless a test installed a hook."""
    if _hook is not None:
        assert name in _declared, f"fault point {name!r} was never declared"
        _hook(name)
