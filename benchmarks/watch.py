"""What the watch costs: one exchange of 4 KiB between two ranks without it, with it, and with calls compared.

    python benchmarks/watch.py [--runs 5] [--exchanges 2000]

Each run is two fresh processes over gloo on one machine; the three sides take turns. The last lines are medians: the
seconds of an exchange, and the processor time that the watch takes of a rank which does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "watch.json"
SIDES = ("without", "watched", "compared")
IDLE_SECONDS = 5.0
WARM_UP = 100


def rank(side: str, exchanges: int) -> None:
    """One process of one run; rank 0 prints its figures."""
    import torch

    from rft_dist.health.activity import Activity
    from rft_dist.launch.process_group import (
        HealthConfig,
        ranks_from_environment,
        start_process_group,
        start_watch,
        stop_process_group,
    )
    from rft_dist.settings import WatchSettings

    torch.set_num_threads(1)
    info = ranks_from_environment()
    settings = WatchSettings(fingerprint_steps=1 if side == "compared" else 0)
    watched = None if side == "without" else HealthConfig(Activity(), settings)
    ranks = start_process_group(info, torch.device("cpu"), watched=watched)
    watch = start_watch(info, watched) if watched else None
    tensor = torch.ones(1024)
    for _ in range(WARM_UP):
        ranks.sum(tensor)
    start = time.perf_counter()
    for _ in range(exchanges):
        total = ranks.sum(tensor)
    seconds = (time.perf_counter() - start) / exchanges
    assert total.tolist() == [2.0] * 1024
    used = time.process_time()
    time.sleep(IDLE_SECONDS)
    idle = (time.process_time() - used) / IDLE_SECONDS
    if info.rank == 0:
        print(json.dumps({"exchange": seconds, "idle": idle}))
    if watch is not None:
        watch.close()
    stop_process_group()


def run(side: str, exchanges: int) -> dict[str, float]:
    """Figures of one run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--side", side, "--exchanges", str(exchanges)]
    processes = [
        subprocess.Popen(words, env=os.environ | shared | {"RANK": str(number)}, stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return json.loads(said[0])


def main() -> None:
    """All runs, the table, the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--exchanges", type=int, default=2000)
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.side:
        rank(options.side, options.exchanges)
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.runs):
        for side in SIDES:
            found[side].append(run(side, options.exchanges))
    medians = {
        side: {name: statistics.median(row[name] for row in rows) for name in ("exchange", "idle")}
        for side, rows in found.items()
    }
    for side, row in medians.items():
        print(
            f"{side:<9} {1e6 * row['exchange']:7.1f} us an exchange   {100 * row['idle']:6.3f} % of a core while idle"
        )
    record = {"runs": options.runs, "exchanges": options.exchanges, "medians": medians, "all": found}
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps(record | {"machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
