"""Memory of a model's vision tower on a rank, by formula, beside its decoder."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.planning.image_tokens import ImagePlan, image_plan
from rft.planning.workload import RM, Workload
from rft_dist.planning.memory_estimate import DecoderSizes, MemoryTerm, TrainingMemoryConfig, activation_bytes_of_block
from rft_models.files.directories import existing_directory
from rft_models.files.vision_tower_sizes import TowerSizes, tower_sizes
from rft_trainer.data.task_rows import is_task

_TOWER_NAMES = ("visual", "vision_tower")


@dataclass(frozen=True, slots=True)
class ImageParts:
    """Image tokens and memory terms that images add to a plan."""

    images: ImagePlan | None
    """Of the training rows; None without images, or where the data are not on this machine."""
    parameters: int
    """Of the vision tower."""
    terms: list[MemoryTerm]
    notes: list[str]


def image_parts(
    workload: Workload,
    settings: Any,
    values: Mapping[str, Any],
    run: TrainingMemoryConfig,
    positions: int | None,
    *,
    reads_rows: bool,
) -> ImageParts:
    """Return the tokens of images, where rows are read for them, and the memory of the vision tower.

    Raises:
        DataError, OptionsError: as the start would.
    """
    images, unread = planned_images(workload, settings, positions) if reads_rows else (None, [])
    parameters, terms, about = tower_part(values, run, images.tokens_a_row[2] if images else None)
    return ImageParts(images, parameters, terms, [*unread, *about])


def tower_part(
    values: Mapping[str, Any], run: TrainingMemoryConfig, tokens_a_row: int | None
) -> tuple[int, list[MemoryTerm], list[str]]:
    """(parameters, terms, notes) of the tower of `pretrain`; nothing for a model of text.

    Args:
        values: the settings of the run.
        run: what it holds beside its model.
        tokens_a_row: placeholders of the row with most of them; None where no data were read.
    """
    sizes = tower_sizes(values["pretrain"])
    if sizes is None:
        return 0, [], []
    summary = f"{sizes.parameters:,} parameters more are the vision tower's"
    if not values.get("images_key"):
        return sizes.parameters, weight_terms(sizes, run, trained=False), [f"{summary}, which no row of this run uses"]
    frozen = any(name in prefix for prefix in _prefixes(values) for name in _TOWER_NAMES)
    terms = weight_terms(sizes, run, trained=not frozen and not run.adapter_weights)
    notes = [f"{summary}{', frozen' if frozen else ''}"]
    if tokens_a_row is None:
        return (
            sizes.parameters,
            terms,
            [*notes, "no row was read: what the tower keeps for the backward pass is left out"],
        )
    if not frozen:
        terms.append(activation_term(sizes, run, tokens_a_row * values["micro_train_batch_size"]))
    return sizes.parameters, terms, notes


def weight_terms(sizes: TowerSizes, run: TrainingMemoryConfig, *, trained: bool) -> list[MemoryTerm]:
    """P w of weights, and where they are trained P g of gradients and 2 P m of moments, as of the decoder.

    A copy for the reference is P w more. Ranks share them out as they share out the decoder's.
    """
    policy, reference = run.layout.policy, run.layout.reference
    # with float32 copies, gradients and moments are float32 too
    narrow = 4 if run.master_copy else run.weight_bytes
    rows = [("tower parameters", run.weight_bytes, policy.weights, True, run.host_weights)]
    if run.reference:
        rows.append(("tower of the reference", run.weight_bytes, reference.weights, True, run.host_weights))
    if trained:
        rows.append(("tower gradients", narrow, policy.gradients, False, run.host_weights))
        more = 4 * run.master_copy + 4 * run.average
        rows.append(("tower moments", 2 * narrow + more, policy.optimizer, True, run.host_moments))
    return [_shared_out(sizes.parameters, run, *row) for row in rows]


def _shared_out(
    count: int, run: TrainingMemoryConfig, name: str, size: int, shared: bool, stays: bool, host: bool
) -> MemoryTerm:
    ranks = run.layout.shard_ranks if shared else 1  # a tower's matrices are never cut
    over = f" / {ranks} ranks (by division)" if ranks > 1 else ""
    return MemoryTerm(
        name, -(-count * size // ranks), f"{count:,} x {size} bytes{over}", in_rollout=stays, on_host=host
    )


def activation_term(sizes: TowerSizes, run: TrainingMemoryConfig, num_tokens: int) -> MemoryTerm:
    """T L b of all blocks over the T patches behind so many placeholders; recomputed: T L h w, and b of one block.

    b is that of a decoder's block of these widths with as many heads of keys as of queries. An image that several
    samples share runs once, so this is the most.
    """
    patches = num_tokens * sizes.patches_per_token
    like = DecoderSizes(
        vocab=0, hidden=sizes.hidden, layers=sizes.layers, query_width=sizes.hidden, kv_width=sizes.hidden,
        ffn=sizes.ffn, tied=True,
    )  # fmt: skip
    block = activation_bytes_of_block(like, run.compute_bytes)
    if run.recomputes:
        # of every block its input is kept; one block at a time is computed again
        kept = sizes.hidden * run.compute_bytes
        formula = f"at most {patches:,} patches x ({sizes.layers} x {kept:,} + {block:,} bytes)"
        num_bytes = patches * (sizes.layers * kept + block)
        return MemoryTerm("tower activations", num_bytes, formula, in_rollout=False, phase="passes")
    formula = f"at most {patches:,} patches x {sizes.layers} blocks x {block:,} bytes"
    num_bytes = patches * sizes.layers * block
    return MemoryTerm("tower activations", num_bytes, formula, in_rollout=False, phase="passes")


def planned_images(workload: Workload, settings: Any, positions: int | None) -> tuple[ImagePlan | None, list[str]]:
    """The images of the data, and notes on what could not be read: data and processor may be on other machines.

    Raises:
        DataError, OptionsError: as of `image_plan`.
    """
    if not settings.images.images_key:
        return None, []
    path = existing_directory(settings.model.pretrain)
    missing = _missing(settings.data.prompt_data, path) if tower_sizes(path) else ""
    if not missing and workload is RM:
        missing = "of pairs they are when the run, or its check, reads the rows"
    if missing:
        return None, [f"images are not counted: {missing}"]
    limit, flag = workload.row_limit(settings, positions)
    return image_plan(settings, limit=limit, limit_flag=flag), []


def _missing(prompt_data: str, path: Path) -> str:
    """Return the reason why images cannot be counted on this machine; "" where everything is there."""
    if not prompt_data:
        return "prompt_data is empty"
    for part in filter(None, map(str.strip, prompt_data.split(","))):
        if not (glob.has_magic(part) or is_task(part) or Path(part).expanduser().exists()):
            return f"{part} is not on this machine"
    processors = ("processor_config.json", "preprocessor_config.json")
    if not any((path / name).is_file() for name in processors) or not (path / "tokenizer_config.json").is_file():
        return f"{path} has no image processor or no tokenizer beside config.json"
    return ""


def _prefixes(values: Mapping[str, Any]) -> list[str]:
    return str(values.get("freeze_prefix") or "").split(",")
