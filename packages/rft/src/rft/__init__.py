"""The library behind `rft-train`: from settings to a run. Reads no argv, prints nothing, holds no equation.

`rft.Run` is a run as an object (`rft.library.run`); the import of the package itself loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.library.run import Run as Run

__version__ = "0.1.0"
__all__ = ["Run"]


def __getattr__(name: str) -> Any:
    if name != "Run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rft.library.run import Run

    return Run
