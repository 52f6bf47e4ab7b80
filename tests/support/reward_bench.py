"""Rewards that are models, small: a reward model on disk, a reward server and a server that judges."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rft_models.reward_model.loading import new_reward_model
from rft_models.reward_model.spec import RewardSpec

TEMPLATE = "{task_instruction} {response} {response}"


class RewardServers:
    """One port: `/score` tells the length of each response, `/count` the number of responses in the request, `/slow`
    takes its time, `/shaky` drops every other connection, `/busy` refuses every other request but those by which it is
    tried, `/v1/chat/completions` judges by counting digits."""

    def __init__(self) -> None:
        self.requests = self.busy = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests += 1
                if self.path == "/shaky" and outer.requests % 2:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if self.path == "/busy" and body["prompt_ids"] != ["probe:0"]:
                    outer.busy += 1
                    if outer.busy % 2:
                        self.send_response(503)
                        self.send_header("Retry-After", "0")
                        self.end_headers()
                        return
                if self.path == "/slow":
                    time.sleep(0.3)
                content = json.dumps(_judged(body) if "model" in body else _scored(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()


def _scored(path: str, body: dict[str, Any]) -> dict[str, Any]:
    texts = body["responses"]
    number = float(len(texts))
    return {"rewards": [number + 0.01 * len(text) if path == "/count" else float(len(text)) for text in texts]}


def _judged(body: dict[str, Any]) -> dict[str, Any]:
    """A score from 0 to 10 that follows from everything in the request."""
    question = body["messages"][0]["content"]
    score = (sum(letter.isdigit() for letter in question) + len(body["model"]) + body["max_tokens"]) % 11
    return {"choices": [{"message": {"content": f"k{score // 2} <score>{score}</score>"}}]}


def write_reward_model(pretrain: Path, path: Path, *, seed: int = 3) -> Path:
    """A reward model with two heads that nobody trained."""
    spec = RewardSpec(heads=("long", "clear"), weights=(1.0, 0.5))
    new_reward_model(pretrain, spec, seed=seed).save_pretrained(path)
    return path


def reward_places(pretrain: Path, root: Path, servers: RewardServers) -> dict[str, str]:
    """What stands for each of them in a command line."""
    (root / "judge.txt").write_text(TEMPLATE)
    return {
        "{rm}": str(write_reward_model(pretrain, root / "rm")),
        "{judge.txt}": str(root / "judge.txt"),
        "{server}": servers.url,
        "{judge}": f"--judge_url {servers.url}/v1 --judge_model m",
    }
