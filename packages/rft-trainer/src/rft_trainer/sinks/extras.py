"""Import of optional trackers when they are requested."""

from __future__ import annotations

import importlib
from types import ModuleType

from rft_core.errors import PreflightError, install_command


def import_extra(module: str, *, extra: str, flag: str) -> ModuleType:
    """Import a module, or raise `PreflightError` with what is missing, its purpose, and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        broken = "" if missing.split(".")[0] == extra else f" (it is installed, but needs {missing})"
        raise PreflightError(
            code=f"extra.{extra}",
            what=f"{extra} cannot be imported{broken}: {error}",
            where=flag,
            why=f"{flag} sends the records of the run to {extra}, an optional dependency",
            do=install_command(extra),
        ) from error
