"""Records of a script of MiniOneRec and of its parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a script: it stands for a setting, or is refused.

    Example: `Parameter("base_model", "pretrain")` is `--base_model DIR` for `--pretrain DIR`.
    """

    name: str
    to: str = ""
    """The setting of the command that has its meaning; empty = it is refused."""
    about: str = ""
    """Where its meaning differs, or which value is accepted of one that is refused."""
    refusal: str = ""
    """Why it is refused."""
    do: str = ""
    """What to use in its place, where it is refused."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, in its shell and Python form, and the command that stands for it."""

    paths: tuple[str, ...]
    """Paths in MiniOneRec's repository."""
    command: str
    """Name of the command: `genrec-sft` is `rft-train genrec sft`."""
    words: str = ""
    """Flags that the command has in any case."""
    parameters: tuple[Parameter, ...] = ()

    @property
    def line(self) -> str:
        """Return the command as it is typed."""
        return f"rft-train {self.command.replace('-', ' ', 1)} {self.words}".strip()

    def parameter(self, name: str) -> Parameter:
        """Return the record of a parameter.

        Raises:
            StopIteration: the script has no such parameter.
        """
        return next(parameter for parameter in self.parameters if parameter.name == name)


def taken(*names: str) -> tuple[Parameter, ...]:
    """Return parameters that have the same name and meaning here."""
    return tuple(Parameter(name, name) for name in names)
