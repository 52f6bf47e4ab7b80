"""Import of a Python file that a user names: a reward, an algorithm, an environment, code of a model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(file: str | Path, name: str, *, with_neighbours: bool = False) -> ModuleType:
    """Run a Python file and return it as the module `name` of this process.

    The module is in `sys.modules` before its code runs, because libraries look a class's source up there.

    Args:
        file: a path that ends in .py.
        name: name of the module; one of the same name is replaced.
        with_neighbours: put the file's folder first among the import paths, as where it runs as a script.

    Raises:
        ValueError: the name does not end in .py.
        Exception: whatever the code of the file raises.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: the name of a Python file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if with_neighbours:
        sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
