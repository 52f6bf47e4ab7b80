"""Process environment of a command: its device, ranks and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rft.installation.start import check_installation, why_no_gpu
from rft.process.cores import usable_cores
from rft.process.determinism import repeat_exactly
from rft.process.monitored import MonitoredProcess, first_line, watched_process
from rft.process.rank_log import logged
from rft_core.errors import PeerError, PreflightError, RftError
from rft_dist.collectives import Collectives
from rft_dist.health.activity import Activity
from rft_dist.launch.environment import environment_report, requested_backend
from rft_dist.launch.process_group import (
    HealthConfig,
    RankInfo,
    meet_ranks,
    ranks_from_environment,
    start_process_group,
)
from rft_dist.optim.cpu_products import cpu_multiplies_bf16
from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.preflight.run_preflight import Preflight, PreflightReport, RequestedRun
from rft_dist.settings import WatchSettings
from rft_trainer.metrics.compute_meter import ComputeMeter
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.runs.checkpointing import Progress


@dataclass(frozen=True, slots=True)
class Machine:
    """One process of a run."""

    device: str
    ranks: RankInfo
    collectives: Collectives
    preflight: PreflightReport | None = None
    """What the ranks checked before they began; None where nothing is trained."""
    watched: MonitoredProcess | None = None

    @property
    def is_first(self) -> bool:
        """True on the process that writes and prints."""
        return self.ranks.rank == 0

    def environment(self) -> list[tuple[str, str, str]]:
        """Return (name, value, effect) of the environment variables that change a run."""
        return environment_report()

    def attach(self, run: Path, resume_command: str) -> None:
        """Direct the log and the files of the health monitor into the run's directory."""
        if self.watched is not None:
            self.watched.attach(run, resume_command)

    def forget_last_failure(self) -> None:
        """Delete the files of an earlier failure, as the run begins or continues."""
        if self.watched is not None:
            self.watched.watch.folder.clear()

    def phase_timer(self, progress: Progress, meter: ComputeMeter | None = None) -> PhaseTimer:
        """The timer of a loop, which the watch of this process follows; `meter` counts the arithmetic of its steps."""
        if self.watched is None:
            return PhaseTimer(meter=meter)
        activity = self.watched.watch.activity
        activity.follow(lambda: progress.step + 1)
        return PhaseTimer(listener=self.watched, meter=meter, waited=lambda: activity.waited)

    def describe(self) -> str:
        """One line for the start of a run."""
        threads = torch.get_num_threads()
        noun = "thread" if threads == 1 else "threads"
        ranks = "1 process" if self.ranks.world_size == 1 else f"{self.ranks.world_size} ranks"
        num_threads = os.environ.get("OMP_NUM_THREADS")
        why = f"OMP_NUM_THREADS={num_threads}" if num_threads else f"of {usable_cores()} usable cores"
        return f"{ranks} on {self.device}, {threads} torch {noun} each ({why})"


def choose_device(wanted: str, local_rank: int) -> str:
    """`auto` is the GPU of this rank if there is one, else the CPU; `cuda` without a GPU is refused."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        found = why_no_gpu()
        raise PreflightError(
            code="device.no_cuda",
            what=f"device = {wanted}, and torch {torch.__version__} sees no CUDA device",
            where="--device",
            why=found.why if found else "a CUDA device and a torch build that supports it are needed",
            do=(found.do if found else "") or "--device cpu",
        )
    return f"cuda:{local_rank % torch.cuda.device_count()}"


@contextmanager
def open_machine(
    wanted_device: str,
    request: RequestedRun | None = None,
    limits: WatchSettings | None = None,
    *,
    debug: bool = False,
    command: Sequence[str] = (),
    show_error: Callable[[RftError], None] | None = None,
) -> Generator[Machine]:
    """Join the ranks that the environment names, watch them, and leave them at the end.

    On a CPU each rank takes its share of the cores that this process may use, unless OMP_NUM_THREADS says
    otherwise: two ranks with all cores each are many times slower. A smaller number that the caller chose stays.
    `request` is a training run, whose ranks compare themselves before its model loads; None compares nothing.
    `command` is the first line of the log of each rank; `show_error` as in `FrontEnd`.
    """
    num_devices = torch.cuda.device_count() if wanted_device != "cpu" else 0
    ranks = ranks_from_environment(num_local_devices=num_devices)
    device = choose_device(wanted_device, ranks.local_rank)
    if request is not None:
        check_installation(wanted_device, device, is_first=ranks.rank == 0)
    ranks_here = ranks.world_size
    preflight = Preflight(request) if request is not None else None
    if preflight is not None:
        shares_devices = requested_backend() == "gloo"
        ranks_here = preflight.grid(ranks, num_devices=num_devices, shares_devices=shares_devices).ranks_per_node
    # every rank here with all cores would take them from the others
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, usable_cores() // ranks_here)
        if share < torch.get_num_threads():
            torch.set_num_threads(share)
    repeat_exactly(device, debug=debug)
    compare = preflight.compare if preflight is not None else None
    watched = HealthConfig(Activity(), limits or WatchSettings(), always_compares=debug)
    # the log opens before the ranks meet, because a meeting that fails has to be in it
    with logged(ranks.rank, first_line(ranks, device, command)) as log:
        try:
            # before the watch: there is no store to watch through yet
            store = meet_ranks(ranks)
        except PeerError as error:
            log.write(f"{error}\n")
            if preflight is not None:
                log.attach(preflight.run)  # the log of a run that goes on, or of ranks that --nproc started
            raise
        with watched_process(
            ranks, watched, log, show_error
        ) as process:  # from the first moment at which a rank can be missed
            where = torch.device(device)
            collectives = start_process_group(ranks, where, store=store, compare=compare, watched=watched)
            yield Machine(device, ranks, collectives, preflight.report() if preflight else None, process)
            collectives.gather_bytes(b"")  # nobody leaves before all have ended well: rank 0 serves the others' store


def of_unstarted_ranks(machine: Machine, grid: ParallelDims) -> Machine:
    """Return the first of the ranks of this grid, none of which is started, as pages show it."""
    ranks = replace(machine.ranks, world_size=grid.world_size)
    return replace(machine, ranks=ranks, preflight=PreflightReport(grid, None, ""))


def bfloat16_arithmetic(device: str) -> str:
    """Return a note on this device's bfloat16 arithmetic; empty where there is nothing to note."""
    if device != "cpu":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        faster = "--amp in the place of --bf16 multiplies in float16 on it, beside float32 weights"
        return "" if native else f"this GPU has no bfloat16 arithmetic and emulates it, which is slow: {faster}"
    if cpu_multiplies_bf16():
        return "products in bfloat16 by the processor's own instructions, summed in float32"
    return "this processor has no bfloat16 instructions: exact, but slower than float32; leave --bf16 out to be faster"
