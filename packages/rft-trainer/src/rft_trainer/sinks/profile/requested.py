"""The profile that a run's settings ask for."""

from __future__ import annotations

from rft_trainer.metrics.sink import Sink
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.optional import OptionalSink
from rft_trainer.sinks.profile.sink import FOLDER, ProfileSink
from rft_trainer.sinks.profile.steps import parse_steps

_COMPILED = "compiled layers on a CPU would be compiled anew to be counted"


def requested_profile(
    run: RunSettings, files: OptionalFiles, *, command: str, device: str, world_size: int, compiled: bool
) -> list[Sink]:
    """Return the sink that records the steps of `profile`; none where it is empty.

    Args:
        run: settings with the steps.
        files: counts what cannot be written.
        command: that made the run.
        device: of this rank.
        world_size: number of ranks.
        compiled: whether layers may be compiled.
    """
    if not run.profile:
        return []
    why_unread = _COMPILED if compiled and not device.startswith("cuda") else ""
    sink = ProfileSink(
        parse_steps(run.profile), command=command, device=device, world_size=world_size, why_unread=why_unread
    )
    return [OptionalSink(sink, f"{FOLDER}/", files)]
