"""`rft-train serve-reward`: answer requests for rewards over HTTP until it is stopped."""

from __future__ import annotations

from rft.serving.listening import until_stopped
from rft.serving.server import start_server
from rft_cli.config.resolve import resolve
from rft_core.terminal_text import visible


def run(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM, then say how much was answered."""
    settings = resolve("serve-reward", argv).settings
    with until_stopped() as stopped, start_server(settings) as server:
        print(visible(f"rewards   {', '.join(server.names)}"))
        token = f", with {server.token_variable} in its environment" if server.token_variable else ""
        print(f"serving   {server.url}: a training asks it by --remote_rm_url {server.url}{token}")
        print(f"health    {server.url.removesuffix('score')}health; Ctrl-C ends the server", flush=True)
        stopped.wait()
    figures = server.counters
    print(f"answered  {figures.requests:,} requests: {figures.responses:,} responses, {figures.unscored:,} unscored")
    return 0
