"""`rft-train genrec sft`: rows and model are made from the catalogue, then it is supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft.check import SftCheck, check_sft
from rft.front_end import SILENT, FrontEnd
from rft.planning.start_plan import SFT_START
from rft.resolved import Resolved
from rft.run_lifecycle import TrainedRun
from rft.stages.sft import read_sft
from rft.stages.supervised.row_training import train_on_rows
from rft_core.errors import OptionsError
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.settings.rules import chosen_tasks
from rft_genrec.settings.sft import GenrecSftSettings
from rft_genrec.training.models import prepared_model
from rft_genrec.training.rows import held_out_file, training_files
from rft_trainer.runs.stop_signals import StopSignals


def with_inputs(resolved: Resolved[Any]) -> Resolved[Any]:
    """Return the settings with the model that the run begins with, and the files of its rows; both are written.

    Raises:
        DataError: a catalogue without IDs or samples, or a model whose vocabulary does not go with them.
        OptionsError: freeze_llm without new tokens, or sequences that no token divides.
    """
    settings: GenrecSftSettings = resolved.settings
    if settings.data.prompt_data:  # prepared already
        return resolved
    dataset, ids = chosen_dataset(settings.catalogue)
    builder = PromptBuilder(ids, settings.tasks.max_history, settings.tasks.template)
    tasks = chosen_tasks(settings.tasks.tasks)
    files = training_files(dataset, builder, settings.tasks, tasks, seed=settings.run.seed)
    held_out = None if settings.data.held_out_rows else held_out_file(dataset, builder)
    _refuse_waiting(settings, has_held_out=held_out is not None or settings.data.held_out_rows > 0)
    directory, first_new = prepared_model(settings, builder)
    values: dict[str, Any] = {
        "pretrain": str(directory),
        "prompt_data": ",".join(map(str, files)),
        "eval_data": "" if held_out is None else str(held_out),
        "apply_chat_template": settings.tasks.template == "chat",
    }
    if settings.model.freeze_llm:
        values["train_only_tokens_from"] = first_new
    return resolved.with_values(values)


def train(
    resolved: Resolved[Any],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Train from the settings to the end of the run, as `rft.stages.sft.train` does."""
    return train_on_rows(
        read_sft,
        resolved,
        command,
        in_place=in_place,
        signals=signals,
        front=front,
        prepare=with_inputs,
        fit=SFT_START,
    )


def check(settings: GenrecSftSettings, world_size: int) -> SftCheck:
    """Read and render the rows, as the start would; `settings` are those that `with_inputs` returned."""
    return check_sft(settings, world_size)


def _refuse_waiting(settings: GenrecSftSettings, *, has_held_out: bool) -> None:
    waiting = [name for name in ("patience", "target_loss") if getattr(settings.training, name)]
    if waiting and not has_held_out:
        raise OptionsError(
            code="genrec.waits_for_held_out",
            what=f"{waiting[0]} = {getattr(settings.training, waiting[0])}, and the catalogue has no split valid",
            where=f"--{waiting[0]}",
            why=f"{waiting[0]} depends on the held-out loss, and no rows are held out",
            do="--held_out_rows 200",
        )
