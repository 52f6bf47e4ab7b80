"""A run whose process dies is started again, by the process that started it. No torch is imported here."""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import ExitCode, NoProgressError
from rft_core.terminal_text import visible
from rft_dist.checkpoint_format.layout import CHECKPOINTS, published
from rft_dist.health.error_files import ERROR_FILE
from rft_dist.launch.spawn import Ended

SUPERVISED = "RFT_SUPERVISED"
"""Set in the processes that are started again: the file into which the first rank writes where its run is."""
_LOG = logging.getLogger(__name__)
_UNEXPECTED = 1
_ASKED_TO_END = frozenset(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
_METRICS = "metrics.jsonl"
_TAIL_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Death:
    """An end of a start; two that are equal did the same thing."""

    step: int | None
    code: int
    cause: str


def note_run(path: Path, environment: Mapping[str, str]) -> None:
    """Write where the run is for the process that starts it again, where there is one."""
    file = environment.get(SUPERVISED)
    if file:
        Path(file).write_text(str(path.resolve()), encoding="utf-8")


def supervise(
    start: Callable[[Path | None, Mapping[str, str]], Ended], restarts: int, kept: Callable[[], int] | None = None
) -> int:
    """Start a run, again whenever its process dies, and return the exit code of the last start.

    A process dies that is killed by a signal, raises what nobody expected, or ends because another rank is gone. Any
    other end is its own, and so is one after a signal that asks it to end: it is not started again.

    Args:
        start: `(run, variables) -> Ended`: start the run, or continue the one in `run`, with these variables of the
            environment, and wait for its end.
        restarts: number of restarts in a row that lead to no newer checkpoint.
        kept: bytes of the rows that an evaluation has on disk; more of them count as a newer checkpoint does.

    Raises:
        NoProgressError: so many restarts led to no newer checkpoint, or two starts in a row ended at the same step with
            the same error.
    """
    with tempfile.TemporaryDirectory(prefix="rft-run-") as folder:
        note = Path(folder) / "run"
        run: Path | None = None
        newest: int | None = None
        last: _Death | None = None
        used = 0
        num_bytes = kept() if kept else 0
        while True:
            ended = start(run, {SUPERVISED: str(note)})
            if ended.asked or not _is_death(ended.code):
                return ended.code
            run = Path(note.read_text(encoding="utf-8")) if note.is_file() else None
            death = _Death(_last_step(run), ended.code, _cause(run))
            reached = max(published(run / CHECKPOINTS), default=None) if run else None
            if reached != newest:
                newest, used = reached, 0
            if kept and kept() > num_bytes:
                # an evaluation counts no steps: two ends in a row look alike, with other rows between them
                num_bytes, used, last = kept(), 0, None
            if death == last or used == restarts:
                raise _no_progress(run, death, newest, used, repeated=death == last)
            last, used = death, used + 1
            _say(run, death, newest, used, restarts)


def _is_death(code: int) -> bool:
    return code in (_UNEXPECTED, ExitCode.PEER) or (code > 128 and code not in (*_ASKED_TO_END, 130))


def _last_step(run: Path | None) -> int | None:
    """Return the last step that the run has recorded; None where it has none."""
    if run is None or not (run / _METRICS).is_file():
        return None
    with (run / _METRICS).open("rb") as file:
        file.seek(max(0, (run / _METRICS).stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # a kill cuts the last line
            return int(json.loads(line)["step"])
    return None


def _cause(run: Path | None) -> str:
    """Return what the run itself says of its failure; empty where it could say nothing, as after a kill."""
    if run is None:
        return ""
    try:
        return str(json.loads((run / ERROR_FILE).read_text(encoding="utf-8"))["what"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _ended(death: _Death) -> str:
    at = "before its first step" if death.step is None else f"after step {death.step}"
    cause = f": {death.cause}" if death.cause else ""
    if death.code > 128:
        with suppress(ValueError):
            return f"it was killed by {signal.Signals(death.code - 128).name} {at}{cause}"
    return f"it ended with exit code {death.code} {at}{cause}"


def _origin(newest: int | None) -> str:
    return "its beginning" if newest is None else f"step {newest}"


def _say(run: Path | None, death: _Death, newest: int | None, used: int, restarts: int) -> None:
    line = visible(f"restart {used} of {restarts} from {_origin(newest)}: {_ended(death)}")
    _LOG.warning("%s", line)
    if run is not None and (run / "logs").is_dir():
        # no process of the run has the file open now
        with suppress(OSError), (run / "logs" / "rank_0.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")


def _no_progress(run: Path | None, death: _Death, newest: int | None, used: int, *, repeated: bool) -> NoProgressError:
    if repeated:
        what = f"two starts from {_origin(newest)} ended alike: {_ended(death)}"
        why = "the same step with the same error ends every further start too"
    else:
        what = f"{used} restarts from {_origin(newest)} led to no newer checkpoint; of the last, {_ended(death)}"
        why = f"--restarts {used} allows no more of them in a row"
    place = run or "no run directory was made"
    return NoProgressError(
        code="run.restarts_used",
        what=what,
        where=str(place),
        why=why,
        state=f"the newest checkpoint is that of {_origin(newest)}, untouched" if run else "nothing was begun",
        do=f"rft-train resume {run}, once what ends it is gone: its last lines are in {run / 'logs'}"
        if run
        else "the same command, once what its last lines say is gone",
    )
