"""Ranks that run a small loop under the watch, and one of them at fault. Forked from one process that has torch.

Lines of JSON on stdin: {"folder", "world_size", "fault", "settings", "beat", "remote", "always", "fork": {...}}.
A line {"pids": [...]} comes back at once, and {"codes": [...], "seconds": [...]} when all have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from rft_core.errors import DataError, RftError
from rft_dist.collectives import Collectives
from rft_dist.health import monitor as watch_module
from rft_dist.health.activity import Activity
from rft_dist.launch.process_group import (
    HealthConfig,
    ranks_from_environment,
    start_process_group,
    start_watch,
    stop_process_group,
)
from rft_dist.settings import WatchSettings

STEPS = 4
UNEXPECTED = 1


class Loop:
    """Four steps of phases and exchanges; `fault` says which rank does what, where."""

    def __init__(self, ranks: Collectives, activity: Activity, fault: dict[str, Any]) -> None:
        self.ranks, self.activity, self.fault = ranks, activity, fault
        self.step = 0
        activity.follow(lambda: self.step)

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            self.activity.enter_phase("data")
            self.at("data")
            self.activity.enter_phase("rollout")
            self.at("rollout")
            self.activity.enter_phase("sync")
            self.share_rollouts()
            self.activity.enter_phase("train")
            self.at("train")
            self.update()
            self.activity.enter_phase(None)
            self.at("between")
            self.activity.end_step()
        self.at("end")

    def share_rollouts(self) -> None:
        if self.is_due("skip", "gather"):
            return
        if self.is_due("other", "gather"):
            self.ranks.sum(torch.ones(1, dtype=torch.int64))
            return
        self.ranks.gather_bytes(b"x" * (self.ranks.rank + 1))

    def update(self) -> None:
        if self.is_due("swap", "update"):
            self.largest()
            self.gradient()
        else:
            self.gradient()
            self.largest()
        if self.is_due("extra", "update"):
            self.ranks.sum(torch.ones(2))

    def gradient(self) -> None:
        if self.is_due("skip", "sum"):
            return
        if self.is_due("other", "sum"):
            self.ranks.max(torch.ones(3, 4))
            return
        self.at("sum")
        self.ranks.sum(self.changed(torch.ones(3, 4), "sum"))

    def largest(self) -> None:
        if self.is_due("skip", "max"):
            return
        if self.is_due("other", "max"):
            self.ranks.broadcast_in_place(torch.ones(1))
            return
        self.at("max")
        self.ranks.max(self.changed(torch.ones(1), "max"))

    def changed(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        if self.is_due("shape", place):
            return torch.ones(5, 4) if tensor.dim() == 2 else torch.ones(2)
        if self.is_due("flat", place):
            return tensor.reshape(1, -1)
        if self.is_due("dtype", place):
            return tensor.to(torch.float64)
        if self.is_due("integer", place):
            return tensor.to(torch.int32)
        return tensor

    def is_due(self, kind: str, place: str) -> bool:
        fault = self.fault
        return (
            fault.get("do") == kind
            and fault.get("place") == place
            and self.step == fault["step"]
            and self.ranks.rank in fault["ranks"]
        )

    def at(self, place: str) -> None:
        """What happens here, if it is here."""
        for number in ("SIGSTOP", "SIGKILL"):
            if self.is_due(number, place):
                note_time("fault")
                os.kill(os.getpid(), getattr(signal, number))
        if self.is_due("raise", place):
            note_time("fault")
            raise DataError(code="data.planted", what="row 7 is cut off", where="rows.jsonl:7", why="planted")
        if self.is_due("crash", place):
            note_time("fault")
            raise ValueError("planted crash")
        if self.is_due("exit", place):
            note_time("fault")
            os._exit(3)
        if self.is_due("sleep", place):
            note_time("fault")
            time.sleep(self.fault.get("seconds", 600.0))
        if self.is_due("spin", place):  # computes for ever, in Python
            note_time("fault")
            while True:
                sum(range(1000))
        if self.is_due("leave", place):
            raise Left


class Left(Exception):
    """This rank ends in order, before the others."""


def note_time(name: str) -> None:
    Path(f"{name}_{os.environ['RANK']}").write_text(f"{time.time()}")


def rank(request: dict[str, Any]) -> int:
    """As a command does it: join, watch, run, tell, leave."""
    if os.environ["RANK"] in map(str, request.get("remote", [])):
        setattr(watch_module, "this_machine", lambda: f"elsewhere {os.getpid()}")  # noqa: B010
    info = ranks_from_environment()
    watched = HealthConfig(Activity(), WatchSettings(**request["settings"]), bool(request.get("always")))
    collectives = start_process_group(info, torch.device("cpu"), watched=watched)
    watch = start_watch(info, watched, beat=request["beat"])
    watch.folder.attach(Path("run"), "rft-train resume run")
    code = 0
    try:
        with contextlib.suppress(Left):
            Loop(collectives, watched.activity, request["fault"]).run()
        watch.close()
    except BaseException as error:  # noqa: BLE001 - what a command would do with it
        shown = watch.failed(error) or error
        code = int(shown.exit_code) if isinstance(shown, RftError) else UNEXPECTED
        print(f"error  {shown}", file=sys.stderr, flush=True)
    if code == 0:
        stop_process_group()
    return code


def child(request: dict[str, Any], number: int, port: int) -> None:
    os.setsid()
    folder = Path(request["folder"])
    os.chdir(folder)
    file = os.open(f"rank_{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": request["world_size"], "RANK": number}
    os.environ.update({name: str(value) for name, value in values.items()})
    code = 99
    try:
        code = rank(request)
    except BaseException:  # noqa: BLE001 - a defect of this program or of the watch
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        note_time("end")
        os._exit(code)


def start(request: dict[str, Any]) -> list[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pids: list[int] = []
    for number in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            child(request, number, port)
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> list[int]:
    """Exit codes in order; those that are still there after so long, or stopped, are killed and count as -9."""
    codes: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in pids if pid not in codes]
        stopped = [pid for pid in left if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"]
        if (left and time.monotonic() > until) or (left and left == stopped):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def serve() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pids = start(request)
        print(json.dumps({"pids": pids}), flush=True)
        print(json.dumps({"codes": wait(pids, request.get("limit", 60.0))}), flush=True)


if __name__ == "__main__":
    serve()
