"""One torch thread, an empty working directory for every test, and doubles that note how they are called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, without the settings of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_FAULT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


class Double:
    """Stands for anything by a name; its attributes, calls and blocks are doubles too, and calls are noted as text.

    A double is equal to its name, so that a test writes `"settings.run.seed"` for the value of that attribute.
    """

    def __init__(self, name: str, made: list[str], **values: Any) -> None:
        self.__dict__.update(values)
        self._name, self._made = name, made

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        value = Double(f"{self._name}.{attribute}", self._made)
        setattr(self, attribute, value)
        return value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        words = [*map(repr, arguments), *(f"{name}={keywords[name]!r}" for name in sorted(keywords))]
        self._made.append(f"{self._name}({', '.join(words)})")
        if "returns" in self.__dict__:
            return self.returns
        return Double(f"{self._name}()", self._made)

    def __enter__(self) -> Any:
        self._made.append(f"{self._name} begins")
        return self

    def __exit__(self, *error: object) -> None:
        self._made.append(f"{self._name} ends")

    def __eq__(self, other: object) -> bool:
        return self._name == str(other)

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return self._name


class Calls:
    """Doubles of one test, and the calls of all of them in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.made: list[str] = []

    def double(self, name: str, **values: Any) -> Any:
        """Make a double with these attributes; `returns` is what a call of it gives."""
        return Double(name, self.made, **values)

    def put(self, module: ModuleType, names: str = "", **results: Any) -> None:
        """Put doubles in the place of a module's names; those of `results` give these values when they are called."""
        for name in names.split():
            self._monkeypatch.setattr(module, name, self.double(name))
        for name, result in results.items():
            self._monkeypatch.setattr(module, name, self.double(name, returns=result))

    def replace(self, module: ModuleType, **values: Any) -> None:
        """Put these values in the place of a module's names."""
        for name, value in values.items():
            self._monkeypatch.setattr(module, name, value)

    def taken(self) -> list[str]:
        """Return the calls that were made since the last question."""
        made = list(self.made)
        self.made.clear()
        return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Doubles that note their calls."""
    return Calls(monkeypatch)
