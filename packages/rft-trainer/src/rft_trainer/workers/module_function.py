"""Reward function of a module that is given by its dotted name; this module's `load` runs in a scoring process."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.workers.reward_arguments import STATE
from rft_trainer.workers.user_file import RewardHandler, function_of


def load(module: str, name: str) -> RewardHandler:
    """Import the function `name` of a module, which may be one of the working directory.

    Raises:
        OptionsError: no such module or function. What the module itself raises while it is imported is not caught; the
            pool makes a `DataError` of it.
    """
    # last: a file named math.py or json.py there must not stand in for the library
    sys.path.append(str(Path.cwd()))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        raise OptionsError(
            code="reward.module_missing",
            what=f"no module {error.name} is installed or in {Path.cwd()}",
            where="--reward",
            why="a reward of your own is given as file.py:function or package.module:function",
            state=STATE,
            do=_remedy(module, name),
        ) from error
    return RewardHandler(function_of(imported, module, name), module, name, keeps_errors=True)


def _remedy(module: str, name: str) -> str:
    """Return the nearest module of the same package, or where the package has to be."""
    package, _, last = module.rpartition(".")
    beside = [found.name for found in pkgutil.iter_modules(_folders(package))]
    near = nearest_names(last, beside, count=1)
    if near:
        return f"--reward {package}{'.' * bool(package)}{near[0]}:{name}"
    return f"PYTHONPATH=DIRECTORY, the one that holds {module.partition('.')[0]}"


def _folders(package: str) -> list[str]:
    """Return the folders of a package that can be imported, or the working directory without a package."""
    if not package:
        return [str(Path.cwd())]
    try:
        return list(importlib.import_module(package).__path__)
    except (ImportError, AttributeError):
        return []
