"""The equations of reinforcement fine-tuning, with torch alone: import the modules, such as `rft_algos.objectives`.

The equations and records that people look for can be imported from here by their common names: `from rft_algos import
grpo_loss, rloo, tis` (`rft_algos.aliases` lists them). The import of this package itself loads no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft_algos.aliases import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # what `from rft_algos import *` takes: the names of the equations, which no global has before their first use
    if name == "__all__":
        return importlib.import_module(f"{__name__}.aliases").__all__
    # a room or a module is no reason to load everything else, and statistics need no torch
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    aliases = importlib.import_module(f"{__name__}.aliases")
    if name not in aliases.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # kept, so that the next use is an ordinary attribute
    globals()[name] = value = getattr(aliases, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *importlib.import_module(f"{__name__}.aliases").__all__])
