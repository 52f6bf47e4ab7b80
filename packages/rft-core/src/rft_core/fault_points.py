"""Named instants at which a test may kill the process or fail an operation.

Every place that touches the disk, another process or another rank calls `fault_point` with a
declared name. Without a hook the call costs one comparison. Tests install a hook; nothing is
mocked, so what is tested is the code that runs in production.
"""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[str], None] | None = None
_declared: dict[str, str] = {}


def declare(name: str, meaning: str) -> str:
    """Register a point at import time and give its name back; a second declaration is a bug."""
    assert name not in _declared, f"fault point {name!r} is declared twice"
    _declared[name] = meaning
    return name


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
