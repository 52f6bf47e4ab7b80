"""The command: a dashboard that answers until it is stopped, and the lines that say where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rft.dashboard.json_answers import DashboardAnswers
from rft.dashboard.run_folders import RunFolders
from rft.dashboard.web_server import serving
from rft.resolved import Resolved
from rft.serving.listening import until_stopped
from rft.settings import DashboardSettings
from rft_trainer.rewards.servers.http_client import TOKEN


def lines(resolved: Resolved[DashboardSettings]) -> Iterator[str]:
    """Show runs in a browser until SIGINT or SIGTERM, and yield where.

    Raises:
        OptionsError: no such folder, or an address that cannot be used.
    """
    chosen = resolved.settings.dashboard
    folders = RunFolders([Path(name.strip()).expanduser() for name in chosen.folders.split(",") if name.strip()])
    with until_stopped() as stopped, serving(DashboardAnswers(folders), chosen.host, chosen.port) as address:
        runs = len(folders.runs())
        yield f"dashboard {address} for a browser: {runs} {'run' if runs == 1 else 'runs'} so far"
        if os.environ.get(TOKEN):
            yield f"token     the page asks for that of {TOKEN}"
        yield "          Ctrl-C ends it; runs go on"
        stopped.wait()
    yield "          ended"
