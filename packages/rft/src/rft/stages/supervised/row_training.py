"""A run on rows from its settings to its end: what demonstrations, preferences and reward models do alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rft.front_end import SILENT, FrontEnd
from rft.hub.run_settings import with_local_models
from rft.identity.continuation import continuation, with_commits
from rft.identity.record import Content
from rft.process.launching import requested_run
from rft.process.loading import loading
from rft.process.machine import Machine, open_machine
from rft.process.rollbacks import with_rollbacks
from rft.resolved import Resolved, with_choices
from rft.run_lifecycle import RunStart, TrainedRun, Training, compared_facts, execute, start
from rft.stages.supervised.parts import SupervisedSettings
from rft_trainer.data.media_cache import image_digests
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.rollback import Rollback
from rft_trainer.runs.stop_signals import StopSignals

SettingsT = TypeVar("SettingsT", bound=SupervisedSettings)


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Rows and contents of a run, which it reads before any weights, and how its loop is built from them."""

    data: object
    """Its rows, as the plan shows them."""
    num_steps: int
    contents: dict[str, Content]
    """What the rows, files and code of the run hold."""
    build: Callable[[RunStart], Training]
    """Builds the loop, ready to begin; where the run continues from a checkpoint, exactly in that state."""


def held_out_records(samples: Iterable[TrainingSample]) -> Iterable[list[object]]:
    """Yield held-out samples as JSON values: name, tokens, and the digest of each image."""
    for sample in samples:
        yield [sample.sample_id, *sample.token_ids, *image_digests(sample.media)]


def train_on_rows(
    read: Callable[[Resolved[SettingsT]], ReadRun],
    resolved: Resolved[SettingsT],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
    prepare: Callable[[Resolved[SettingsT]], Resolved[SettingsT]] = lambda resolved: resolved,
    fit: Callable[[Resolved[SettingsT], Machine], Resolved[SettingsT]] = lambda resolved, machine: resolved,
) -> TrainedRun:
    """Train from the settings to the end of the run; `in_place` continues the run in that directory.

    Args:
        read: reads the rows; it is given the settings with the directory of every model.
        resolved: the settings.
        command: what is written into the run directory as the way to start it again.
        in_place: the run to continue; None = a new one.
        signals: stop the run.
        front: shows the plan.
        prepare: makes what the settings describe and do not name, such as a new model, and returns the settings that
            name it.
        fit: chooses what the machine decides, alike on all ranks, and returns the settings with it.
    """
    # before anything is read: a setting that has changed underneath would be told as another fault
    at = with_commits(continuation(resolved, in_place))
    local = prepare(with_local_models(at.resolved))
    settings = local.settings
    request = requested_run(local, in_place)
    with (
        signals or StopSignals() as listening,
        open_machine(
            settings.model.device,
            request,
            settings.watch,
            debug=settings.run.debug,
            command=command,
            show_error=front.show_error,
        ) as machine,
    ):
        asked, local = local, fit(local, machine)
        if local is not asked:
            at = replace(at, resolved=with_choices(at.resolved, asked, local))
        rows = read(local)
        facts = compared_facts(at, machine, rows.contents)
        if machine.is_first:
            front.show_plan(local, rows.data, machine)

        def attempt(rollback: Rollback | None) -> TrainedRun:
            now, place = (at, in_place) if rollback is None else (continuation(at.resolved, rollback.run), rollback.run)
            started = start(now, command, machine, rows.num_steps, facts, in_place=place, front=front)
            with loading(local, machine):
                training = rows.build(started)
            return execute(training, started, listening, rollback)

        return with_rollbacks(attempt)
