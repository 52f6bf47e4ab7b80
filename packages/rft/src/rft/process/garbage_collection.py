"""A start without passes of Python's collector of cycles, which look at every object that imports have made.

A pass frees next to nothing while modules are imported and models are built, and takes a sixth of the time of such a
start. What is not in a cycle is freed at once all the same.
"""

from __future__ import annotations

import atexit
import gc


class _State:
    paused = False


def pause() -> None:
    """Have the collector rest until `go_on`; nothing changes where somebody else has switched it off.

    For the process of a program: the passes that end the interpreter skip what is there by then.
    """
    if gc.isenabled():
        gc.disable()
        atexit.register(gc.freeze)
        _State.paused = True


def go_on() -> None:
    """Have the collector work again, if `pause` switched it off: before anything that lasts begins."""
    if _State.paused:
        gc.enable()
        _State.paused = False
