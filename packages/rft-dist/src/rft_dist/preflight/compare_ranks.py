"""Before a model loads: what differs between the ranks of a run is found and named, over the store where they met.

Every rank publishes short texts (versions, code, settings, files). Rank 0 compares them with its own, looks
whether all see the file that it has just written beside the run's directory, whether machines answer one
another, and how far their clocks are apart. Its verdict is the same error on every rank. What travels is
JSON text. No torch is imported here.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rft_core.errors import PeerError, PreflightError
from rft_dist.launch.environment import RankInfo
from rft_dist.preflight.rank_facts import OF_FILES
from rft_dist.preflight.reachability import KeyValueStore, unreachable_next

MAX_ROWS = 10
"""Differences that the message lists; the others are counted."""
_MOST_NAMED = 3
"""Differences that its remedy names."""
CLOCK_WARNING_SECONDS = 5.0
_FILE_SECONDS = 3.0
"""How long a network file system may take to show a new file."""
_PAUSE = 0.005


@dataclass(frozen=True, slots=True)
class Subject:
    """Facts of one rank for the comparison."""

    facts: Mapping[str, str]
    """Name -> text; a name that a rank does not have is not compared there."""
    run_directory: Path
    """Where the run will be; the folder above it has to be the same one on every machine."""
    problems: tuple[str, ...] = ()
    """What this rank knows already to be wrong with itself."""


@dataclass(frozen=True, slots=True)
class Report:
    """Summary of the comparison, the same on every rank."""

    num_ranks: int
    num_nodes: int
    num_facts: int
    clock_seconds: float
    """Largest difference of a rank's clock from that of rank 0."""
    notes: tuple[str, ...] = field(default=())


def compare_ranks(store: KeyValueStore, ranks: RankInfo, subject: Subject, *, seconds: float) -> Report:
    """Compare; returns on all ranks or raises the same error on all.

    `store` is shared by all ranks and private to this comparison; `seconds` bounds every wait.
    Raises PreflightError naming what differs, PeerError where a rank does not answer.
    """
    try:
        verdict = _verdict(store, ranks, subject, seconds)
    except RuntimeError as error:  # every error of torch's store is one
        raise PeerError(
            code="preflight.store_lost",
            what=f"rank {ranks.rank} ({socket.gethostname()}) lost the store while the ranks were compared",
            where=f"{ranks.master_addr}:{ranks.master_port}",
            why=(str(error).splitlines() or ["no reason was given"])[0][:300],
            do="read the first error of rank 0, which serves the store",
        ) from error
    if verdict["error"]:
        raise PreflightError(**verdict["error"])
    return Report(**{**verdict["report"], "notes": tuple(verdict["report"]["notes"])})


def _verdict(store: KeyValueStore, ranks: RankInfo, subject: Subject, seconds: float) -> dict[str, Any]:
    """Return rank 0's verdict on every rank."""
    subject = replace(subject, problems=(*subject.problems, *unreachable_next(store, ranks, seconds=seconds)))
    _publish(store, ranks, subject)
    if ranks.rank == 0:
        verdict = _judge(store, ranks, subject, seconds)
        store.set("verdict", json.dumps(verdict))
        # An error ends this process and its store with it: the others read first.
        _wait(store, ranks, {rank: f"read/{rank}" for rank in range(1, ranks.world_size)}, seconds)
        return verdict
    _look_at_token(store, ranks, seconds)
    _ask_time(store, ranks, seconds)
    _wait(store, ranks, {0: "verdict"}, seconds)
    verdict = json.loads(store.get("verdict"))
    store.set(f"read/{ranks.rank}", "")
    return verdict


def _publish(store: KeyValueStore, ranks: RankInfo, subject: Subject) -> None:
    message = {
        "host": socket.gethostname(),
        "node": ranks.node_rank,
        "facts": dict(subject.facts) | {"run directory": str(subject.run_directory.absolute())},
        "problems": list(subject.problems),
    }
    store.set(f"facts/{ranks.rank}", json.dumps(message))


def _judge(store: KeyValueStore, ranks: RankInfo, subject: Subject, seconds: float) -> dict[str, Any]:
    """Rank 0: collect, compare, and say."""
    others = range(1, ranks.world_size)
    folder = _existing(subject.run_directory)
    token_file = folder / f".rft-preflight-{secrets.token_hex(8)}"
    notes: list[str] = []
    try:
        token = _write_token(token_file, notes)
        # in the order in which the others ask (token, clock, verdict), or both sides would wait
        store.set("token", json.dumps({"path": str(token_file), "text": token}))
        skews = _answer_clocks(store, ranks, seconds)
        _wait(store, ranks, {rank: f"facts/{rank}" for rank in others}, seconds)
        _wait(store, ranks, {rank: f"seen/{rank}" for rank in others}, seconds)
    finally:
        token_file.unlink(missing_ok=True)
    reports = {rank: json.loads(store.get(f"facts/{rank}")) for rank in range(ranks.world_size)}
    seen = {rank: store.get(f"seen/{rank}").decode() for rank in others}
    differences = {rank: _differences(reports[0], reports[rank], seen[rank], folder) for rank in others}
    differences[0] = [(problem, "", "") for problem in reports[0]["problems"]]
    late = {rank: skew for rank, skew in skews.items() if abs(skew) > CLOCK_WARNING_SECONDS}
    hosts = {rank: report["host"] for rank, report in reports.items()}
    notes += [f"the clock of rank {rank} ({hosts[rank]}) is off by {skew:+.1f} s" for rank, skew in late.items()]
    report = {
        "num_ranks": ranks.world_size,
        "num_nodes": len({entry["node"] for entry in reports.values()}),
        "num_facts": len(reports[0]["facts"]),
        "clock_seconds": max(map(abs, skews.values()), default=0.0),
        "notes": notes,
    }
    return {"error": _error(reports, differences), "report": report}


Row = tuple[str, str, str]
"""(what, on rank 0, on the other one)."""


def _differences(first: Mapping[str, Any], other: Mapping[str, Any], seen: str, folder: Path) -> list[Row]:
    mine, theirs = first["facts"], other["facts"]
    rows = [(name, mine[name], theirs[name]) for name in mine if name in theirs and mine[name] != theirs[name]]
    # files that the other rank lacks are not compared: one rank of each machine reads them for all of it
    rows += [(name, mine[name], "absent") for name in mine if name not in theirs and not name.startswith(OF_FILES)]
    rows += [(name, "absent", theirs[name]) for name in theirs if name not in mine]
    if seen:
        rows.append((f"folder {folder}", "holds the file that rank 0 wrote", seen))
    return rows + [(problem, "", "") for problem in other["problems"]]


def _error(reports: Mapping[int, Mapping[str, Any]], differences: Mapping[int, Sequence[Row]]) -> dict[str, str] | None:
    """The fields of the error; ranks of one node that differ alike are named once."""
    rows_by_rank = {rank: rows for rank, rows in sorted(differences.items()) if rows}
    if not rows_by_rank:
        return None
    by_place: dict[tuple[int, tuple[Row, ...]], list[int]] = {}
    for rank, rows in rows_by_rank.items():
        by_place.setdefault((reports[rank]["node"], tuple(rows)), []).append(rank)
    headlines: list[str] = []
    table: list[str] = []
    for (node, rows), members in by_place.items():
        count = "1 thing" if len(rows) == 1 else f"{len(rows)} things"
        who = f"node {node} ({reports[members[0]]['host']}, {_ranks(members)})"
        headlines.append(f"{who} differs from node {reports[0]['node']} (rank 0) in {count}")
        table += [f"node {node}: {_line(row)}" for row in rows[:MAX_ROWS]]
        table += [f"node {node}: and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else []
    differing = [row[0] for row in rows_by_rank[min(rows_by_rank)]]
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return {
        "code": "preflight.ranks_differ",
        "what": "; ".join(headlines),
        "where": "\n    " + "\n    ".join(table),
        "why": "all ranks of a run need the same code, settings, data and model, and a shared run directory",
        "do": f"make {', '.join(differing[:_MOST_NAMED])}{more} the same on all nodes, then start again",
    }


def _line(row: Row) -> str:
    name, first, other = row
    return f"{name} | rank 0: {first} | here: {other}" if first or other else name


def _ranks(members: Sequence[int]) -> str:
    listed = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
    return f"rank {listed}" if len(members) == 1 else f"ranks {listed}"


def _existing(directory: Path) -> Path:
    """The nearest folder above the run's directory that is there."""
    return next(folder for folder in directory.absolute().parents if folder.is_dir())


def _write_token(file: Path, notes: list[str]) -> str:
    """A text that nobody else knows, on disk; empty where the folder cannot be written."""
    token = secrets.token_hex(16)
    try:
        with file.open("w") as stream:
            stream.write(token)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        notes.append(f"{file.parent} cannot be written ({error.strerror}): not compared whether all nodes share it")
        return ""
    return token


def _look_at_token(store: KeyValueStore, ranks: RankInfo, seconds: float) -> None:
    """Check, on every other rank, that rank 0's token file is visible here too."""
    _wait(store, ranks, {0: "token"}, seconds)
    token = json.loads(store.get("token"))
    store.set(f"seen/{ranks.rank}", _missing(Path(token["path"]), token["text"]) if token["text"] else "")


def _missing(path: Path, want: str) -> str:
    """Empty where the file holds `want`; else what is there instead."""
    deadline = time.monotonic() + _FILE_SECONDS
    while True:
        try:
            token = path.read_text()
            if token == want:
                return ""
            reason = "holds another file of that name"
        except OSError as error:
            reason = "is not there" if not path.parent.is_dir() else f"is another folder ({error.strerror})"
        if time.monotonic() > deadline:
            return reason
        time.sleep(0.05)


def _ask_time(store: KeyValueStore, ranks: RankInfo, seconds: float) -> None:
    """Every other rank: its clock against that of rank 0, half the way there and back taken off."""
    asked = time.time()
    store.set(f"clock/ask/{ranks.rank}", "")
    _wait(store, ranks, {0: f"clock/answer/{ranks.rank}"}, seconds)
    answered = time.time()
    skew = (asked + answered) / 2 - float(store.get(f"clock/answer/{ranks.rank}"))
    store.set(f"clock/skew/{ranks.rank}", f"{skew}")


def _answer_clocks(store: KeyValueStore, ranks: RankInfo, seconds: float) -> dict[int, float]:
    """Rank 0: answer each rank as it asks; rank -> seconds that its clock is ahead."""
    waiting = set(range(1, ranks.world_size))

    def answer() -> bool:
        for rank in list(waiting):
            if store.check([f"clock/ask/{rank}"]):
                store.set(f"clock/answer/{rank}", f"{time.time()}")
                waiting.discard(rank)
        return not waiting

    _poll(answer, ranks, lambda: sorted(waiting), seconds)
    keys = {rank: f"clock/skew/{rank}" for rank in range(1, ranks.world_size)}
    _wait(store, ranks, keys, seconds)
    return {rank: float(store.get(key)) for rank, key in keys.items()}


def _wait(store: KeyValueStore, ranks: RankInfo, keys: Mapping[int, str], seconds: float) -> None:
    """Until every key is there; PeerError naming the ranks whose key is not."""
    left = dict(keys)

    def arrived() -> bool:
        for rank in [rank for rank, key in left.items() if store.check([key])]:
            del left[rank]
        return not left

    _poll(arrived, ranks, lambda: sorted(left), seconds)


def _poll(done: Callable[[], bool], ranks: RankInfo, missing: Callable[[], list[int]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise PeerError(
                code="preflight.no_answer",
                what=f"{_ranks(missing())} did not answer within {seconds:g} s while the ranks were compared",
                where=f"rank {ranks.rank} ({socket.gethostname()}) at {ranks.master_addr}:{ranks.master_port}",
                why="a rank has ended or hangs before its model is loaded",
                do=f"read the first error of {_ranks(missing())}",
            )
        time.sleep(_PAUSE)
