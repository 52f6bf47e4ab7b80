"""Seconds and memory of each function of rft_algos on 1024 sequences x 4096 tokens, beside verl's or TRL's.

    python benchmarks/algos.py [--cases kl gspo ...] [--runs 5] [--gate_only] [--sequences 1024 --width 4096]

See README.md for what is compared. The last line is `worst_ratio=<x> against <peer> <version> at <case>`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algos_sides import Batch, Case, Results, Run
    from torch import Tensor

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "algos.json"
PEERS = {"verl": HERE / "peers" / "verl" / ".venv" / "bin" / "python", "trl": Path(sys.executable)}
"""Whose interpreter runs the cases of a peer: both sides are in one process, where the peer can be imported."""
TOLERANCE = 1e-4
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # freed memory stays with the process: else a call's time is that of the system clearing fresh pages for it
    **{"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
}
SIDES = ("ours", "peer", "bare")


# in the parent: one worker a peer, the table, the file


def run(arguments: argparse.Namespace) -> None:
    """All cases of all peers: measure, print; then the file and the last line."""
    settings: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for peer in arguments.peers:
        for row in _worker(peer, arguments):
            if "setting" in row:
                settings[peer] = row["setting"]
                print(" | ".join(f"{name} {value}" for name, value in row["setting"].items()))
                continue
            rows.append({"peer": f"{peer} {settings[peer][peer]}", **row})
            _print_row(rows[-1], header=len(rows) == 1)
    if rows and not arguments.gate_only:
        _finish(rows, settings, arguments.output)


def _worker(peer: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    command = [str(PEERS[peer]), __file__, "--worker", peer, "--runs", str(arguments.runs)]
    command += ["--sequences", str(arguments.sequences), "--width", str(arguments.width)]
    command += ["--cases", *arguments.cases] if arguments.cases else []
    command += ["--gate_only"] if arguments.gate_only else []
    source = os.pathsep.join(str(HERE.parent / "packages" / name / "src") for name in ("rft-algos", "rft-core"))
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": source}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"the cases of {peer} ended with {process.returncode}")


def _print_row(row: dict[str, Any], *, header: bool) -> None:
    if header:
        print(
            f"{'ours':<40}{'peer':<37}{'ours ms':>9}{'peer ms':>9}{'ratio':>7}{'of CPU':>8}{'bare ms':>9}"
            f"{'floor':>7}{'x floor':>14}{'MiB ours/peer':>15}  apart"
        )
    apart = " ".join("-" if x is None else f"{x:.0e}" for x in row["apart"])
    start = f"{row['case']:<40}{row['peer'].split()[0] + ' ' + row['peer_function']:<37}"
    if "ratio" not in row:
        print(f"{start}  {apart}", flush=True)
        return
    ours, peer, floor = 1e3 * row["ours_seconds"], 1e3 * row["peer_seconds"], 1e3 * row["floor_seconds"]
    bare = "" if row["bare_seconds"] is None else f"{1e3 * row['bare_seconds']:.1f}"
    over = f"{ours / floor:.1f}/{peer / floor:.1f}"
    memory = f"{row['ours_mib']:.0f}/{row['peer_mib']:.0f}"
    print(
        f"{start}{ours:>9.1f}{peer:>9.1f}{row['ratio']:>7.2f}{row['cpu_ratio']:>8.2f}"
        f"{bare:>9}{floor:>7.1f}{over:>14}{memory:>15}  {apart}",
        flush=True,
    )


def _finish(rows: Sequence[dict[str, Any]], settings: dict[str, Any], output: Path | None) -> None:
    worst = min(rows, key=lambda row: row["ratio"])
    place = f"{worst['case']} ({worst['peer_function']})"
    if output is not None:
        report = {"settings": settings, "worst_ratio": worst["ratio"], "worst_case": place, "cases": rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"worst_ratio={worst['ratio']:.2f} against {worst['peer']} at {place}")


# in the worker


def work(arguments: argparse.Namespace) -> None:
    """The cases of one peer, a line of JSON each. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from algos_sides import Batch

    torch.set_num_threads(1)
    module: Any = importlib.import_module(f"algos_{arguments.worker}")
    batches = [Batch(arguments.sequences, arguments.width, observations=observations) for observations in (False, True)]
    bandwidth = _bandwidth()
    setting = {
        **{name: version(name) for name in module.PACKAGES},
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "runs": arguments.runs,
        "sequences": arguments.sequences,
        "width": arguments.width,
        "tokens": batches[0].num_tokens,
        "gigabytes_per_second": round(bandwidth / 1e9, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }
    print(json.dumps({"setting": setting}), file=answers, flush=True)
    for batch in batches:
        for case in module.cases(batch):
            if _chosen(case, arguments.cases):
                print(json.dumps(_row(case, batch, bandwidth, arguments)), file=answers, flush=True)


def _chosen(case: Case, words: Sequence[str] | None) -> bool:
    return not words or any(word in f"{case.name} {case.peer_name}" for word in words)


def _row(case: Case, batch: Batch, bandwidth: float, arguments: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "peer_function": case.peer_name, "departure": case.departure}
    row["apart"] = _checked(case, batch)
    if arguments.gate_only:
        return row
    floor = case.bytes_per_token * batch.num_loss_tokens / bandwidth
    return row | {"floor_seconds": floor, **_measured(case, arguments.runs)}


def _checked(case: Case, batch: Batch) -> list[float | None]:
    """How far the results of both sides are apart (relative L2); ends the benchmark where that is too far."""
    ours, peer = case.gate or (case.ours, case.peer)
    apart = [_apart(a, b, batch) for a, b in zip(ours(), peer(), strict=True)]
    if not any(x is not None for x in apart) or any(x is not None and not x <= TOLERANCE for x in apart):
        raise SystemExit(f"equality gate of {case.name} against {case.peer_name} failed: {apart}")
    return apart


def _apart(ours: Tensor | None, peer: Tensor | None, batch: Batch) -> float | None:
    if ours is None or peer is None:
        return None
    ours, peer = batch.loss_tokens(ours), batch.loss_tokens(peer)
    assert ours.shape == peer.shape, f"{ours.shape} against {peer.shape}"
    return float((ours.double() - peer.double()).norm() / peer.double().norm())


def _measured(case: Case, runs: int) -> dict[str, Any]:
    """Both sides in turn, ours first and last by turns; the gate was the warm-up. Then the memory of one call."""
    sides: dict[str, Run | None] = {"ours": case.ours, "peer": case.peer, "bare": case.bare}
    present = [name for name in SIDES if sides[name] is not None]
    seconds: dict[str, list[float]] = {name: [] for name in present}
    cpu: dict[str, list[float]] = {name: [] for name in present}
    for number in range(runs):
        for name in present if number % 2 == 0 else present[::-1]:
            elapsed, used = _seconds(sides[name])
            seconds[name].append(elapsed)
            cpu[name].append(used)
    cpu_ratio = statistics.median(cpu["peer"]) / statistics.median(cpu["ours"])
    medians = {name: statistics.median(seconds[name]) if name in seconds else None for name in SIDES}
    memory = {f"{name}_mib": _peak_mib(sides[name]) for name in present}
    timed = {f"{name}_seconds": medians[name] for name in SIDES}
    assert medians["peer"] is not None
    assert medians["ours"] is not None
    ratios = {"ratio": medians["peer"] / medians["ours"], "cpu_ratio": cpu_ratio}
    return {**ratios, **timed, **memory, "all_seconds": seconds, "all_cpu_seconds": cpu}


def _seconds(call: Run | None) -> tuple[float, float]:
    """Seconds by the clock and of CPU time, of which the second holds beside other work too."""
    assert call is not None
    start, cpu_start = time.perf_counter(), time.process_time()
    results: Results = call()
    seconds = time.perf_counter() - start, time.process_time() - cpu_start
    del results
    return seconds


def _peak_mib(call: Run | None) -> float:
    """How far the process's resident memory rises above where it stood, over one call.

    Freed memory is handed back to the system first, and the kernel's high-water mark (VmHWM) is put
    back to what is resident.
    """
    assert call is not None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _bandwidth() -> float:
    """Bytes read and written a second by a copy of 256 MiB on one thread: the best of 7."""
    import torch

    source, target = torch.ones(2**26), torch.zeros(2**26)
    best = math.inf
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def parse() -> argparse.Namespace:
    """The command line; `--worker` is for the processes started from here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="WORD", help="only cases whose line has one of these words")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--runs", type=int, default=5, help="measured calls of each side (after 1 of warm-up)")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--width", type=int, default=4096, help="tokens of the longest sequence")
    parser.add_argument("--gate_only", action="store_true", help="compare results, time nothing")
    parser.add_argument("--output", type=Path, help="results file; that of all cases is results/algos.json")
    parser.add_argument("--worker", choices=tuple(PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    whole = arguments.cases is None and len(arguments.peers) == len(PEERS)
    if arguments.output is None and whole and (arguments.sequences, arguments.width) == (1024, 4096):
        arguments.output = RESULTS
    return arguments


if __name__ == "__main__":
    chosen = parse()
    if chosen.worker:
        work(chosen)
    else:
        run(chosen)
