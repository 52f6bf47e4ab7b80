"""`rft-train genrec rl`: histories of the catalogue as prompts, responses drawn among its items, and their reward."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rft.check import RlCheck, check_rl
from rft.front_end import SILENT, FrontEnd
from rft.process.cache import written_once
from rft.resolved import Resolved
from rft.run_lifecycle import TrainedRun
from rft.stages import rl
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.catalogue.records import Dataset, Sample, SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import builder_of
from rft_genrec.settings.rl import GenrecRlSettings
from rft_genrec.settings.rl_rules import reward_terms
from rft_genrec.training.rows import no_samples, stored_rows
from rft_models.files.directories import existing_directory
from rft_trainer.runs.stop_signals import StopSignals

TASK = "genrec"
"""Name of the installed task that gives reward, constraint and metrics."""


def with_inputs(resolved: Resolved[Any]) -> Resolved[Any]:
    """Return the settings with the files of the prompts, the reward, and the items that may be written.

    Raises:
        DataError: a catalogue without IDs or samples, or a model that was not trained on these IDs and prompts.
    """
    settings: GenrecRlSettings = resolved.settings
    if settings.data.prompt_data:  # prepared already
        return resolved
    dataset, ids = chosen_dataset(settings.catalogue)
    builder = builder_of(existing_directory(settings.model.pretrain), ids)
    place = _catalogue_of(settings, dataset, ids)
    files = {
        split: stored_rows(_prompts(dataset.of(split), builder, _reward_of(settings, place)), f"{split}_prompts")
        for split in ("train", "valid")
    }
    if files["train"] is None:
        raise no_samples(dataset, "no samples of the split train with a history")
    values: dict[str, Any] = {
        "prompt_data": str(files["train"]),
        "eval_data": str(files["valid"] or ""),
        "eval_metrics": TASK if files["valid"] else "",
        "reward": TASK,
        "constraint": f"{TASK}:{place}",
        "generate_max_len": 1 + max(map(len, ids.tokens_by_item)),
        "apply_chat_template": builder.template == "chat",
    }
    return resolved.with_values(values)


def train(
    resolved: Resolved[Any],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Train from the settings to the end of the run, as `rft.stages.rl.train` does."""
    return rl.train(resolved, command, in_place=in_place, signals=signals, front=front, prepare=with_inputs)


def check(settings: GenrecRlSettings, world_size: int) -> RlCheck:
    """Read and render the prompts, as the start would; `settings` are those that `with_inputs` returned."""
    return check_rl(settings, world_size)


def _catalogue_of(settings: GenrecRlSettings, dataset: Dataset, ids: SemanticIds) -> Path:
    """Return the directory that reward and constraint read: the catalogue itself, or its items with other IDs."""
    chosen = settings.catalogue
    if not (chosen.sid_index_path or chosen.item_meta_path):
        return Path(chosen.catalogue).expanduser().resolve()

    def write(target: Path) -> None:
        target.mkdir(parents=True)
        name = dataset.catalogue.name
        items = {n: {"title": item.title, "description": ""} for n, item in enumerate(dataset.catalogue.items)}
        (target / f"{name}.item.json").write_text(json.dumps(items), encoding="utf-8")
        index = dict(enumerate(ids.tokens_by_item))
        (target / f"{name}.index.json").write_text(json.dumps(index), encoding="utf-8")

    content = {"ids": ids.digest, "titles": [item.title for item in dataset.catalogue.items]}
    return written_once("recommender_catalogues", content, write)


def _reward_of(settings: GenrecRlSettings, place: Path) -> dict[str, Any]:
    chosen = settings.item_reward
    reward: dict[str, Any] = {"catalogue": str(place), "weights": dict(reward_terms(chosen.genrec_reward))}
    if chosen.item_embeddings:
        reward["embeddings"] = str(Path(chosen.item_embeddings).expanduser().resolve())
    if chosen.item_scorer:
        reward |= {"scorer": chosen.item_scorer, "scorer_path": chosen.item_scorer_path}
    return reward


def _prompts(samples: Sequence[Sample], builder: PromptBuilder, reward: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample with a history: its target stands in the same row, and is bound to nothing else."""
    for sample in samples:
        if sample.history:
            yield {
                "name": sample.sample_id,
                "input": builder.prompt(sample.history),
                "label": builder.response(sample.target),
                "extras": json.dumps({**reward, "history": list(sample.history)}),
            }
