"""The profile that a run's settings ask for, and the one that a person may ask for later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft_trainer.metrics.sink import Sink
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.optional import OptionalSink
from rft_trainer.sinks.profile.asked import FOLDER
from rft_trainer.sinks.profile.sink import ProfileSink
from rft_trainer.sinks.profile.steps import parse_steps

_COMPILED = "compiled layers on a CPU would be compiled anew to be counted"


def requested_profile(
    run: RunSettings, files: OptionalFiles, values: Mapping[str, Any], command: str, device: str, world_size: int
) -> list[Sink]:
    """Return the sink that records the steps of `profile`, and those that are asked for while the run goes on.

    Args:
        run: settings with the steps.
        files: counts what cannot be written.
        values: all settings by name, of which `compile` says whether layers may be compiled.
        command: that made the run.
        device: of this rank.
        world_size: number of ranks.
    """
    compiled = values.get("compile", "off") != "off" and not device.startswith("cuda")
    why_unread = _COMPILED if compiled else ""
    steps = parse_steps(run.profile) if run.profile else None
    sink = ProfileSink(steps, command=command, device=device, world_size=world_size, why_unread=why_unread)
    return [OptionalSink(sink, f"{FOLDER}/", files)]
