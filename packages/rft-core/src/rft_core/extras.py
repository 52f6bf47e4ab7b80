"""The command that installs an optional part of the workspace. No torch is imported here."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the command that adds an extra to what is installed, to be run at the root of the repository.

    Without `--inexact` it would remove the extras that were added before, and without `--no-dev` it would install the
    tools of development.
    """
    return f"uv sync --no-dev --inexact --extra {extra}"
