"""A vision-language model from one checkpoint to the next: opened under one way to lie on ranks, saved again.

As a program it is one of two ranks, which take what one process saved through each way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.checkpoints.writer import ResumePoint, StoreWriter
from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.policy_weights import checkpoint_parts
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_dist.checkpoints.reader import Checkpoint, open_verified
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.settings import AdamSettings, StrategySettings
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import AdapterSettings, ModelSettings
from rft_models.vision.processor import load_vision_processor
from support.image_ranks import loss_of, segments_of
from support.meta_ranks import equal, held

FAMILIES = ("llava", "qwen2_5_vl")
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "fsdp": {"fsdp": True},
    "fsdp from files": {"fsdp": True, "meta_init": True},
    "zero 3": {"zero_stage": 3},
}


def one_process() -> Machine:
    """This process alone."""
    return Machine("cpu", ranks_from_environment({}), SingleProcess())


def open_spread(
    source: Path, machine: Machine, restored: ResumePoint | None, **strategy: Any
) -> ParallelModel[CausalPolicy]:
    """The policy of a directory, or of a checkpoint with its optimizer, laid out."""
    settings, chosen = ModelSettings(pretrain=str(source)), StrategySettings(enable_ema=True, **strategy)
    place = source if restored is None else restored.model_directory
    policy = trainable_policy(settings, chosen, place, machine, load_vision_processor(source), AdapterSettings())
    return parallelize(ShardablePolicy(policy), chosen, AdamSettings(), machine, restored)


def take_a_step(spread: ParallelModel[CausalPolicy]) -> None:
    """On rows with an image and one without."""
    spread.optimizer.backward(-loss_of(spread.model, segments_of(spread.model, 0)) / 20, last=True)
    spread.optimizer.step(1e-2)


def save(spread: ParallelModel[CausalPolicy], machine: Machine, folder: Path) -> Path:
    """A checkpoint of what is held now; all ranks call it."""
    writer = StoreWriter(
        lambda exchange: CheckpointStore(folder, keep_last=None, keep_bytes=None, run_id="images", exchange=exchange),
        {},
        machine.collectives,
    )
    writer.save(
        1,
        tensors={"optimizer": spread.optimizer.checkpoint_tensors()},
        records={},
        policy=checkpoint_parts(spread, machine.collectives),
        metadata={},
    )
    return folder / "step_000001"


def passed_on(source: Path, checkpoint: Path, machine: Machine, folder: Path, **strategy: Any) -> Path:
    """Open a checkpoint, change nothing, save it."""
    restored = ResumePoint(open_verified(checkpoint))
    return save(open_spread(source, machine, restored, **strategy), machine, folder)


def opened(path: Path) -> Checkpoint:
    """For looking into it."""
    return open_verified(path)


def equal_steps(source: Path, machine: Machine) -> dict[str, bool]:
    """Whether a model whose ranks read their blocks alone computes and steps as one that was loaded whole."""
    found: list[tuple[dict[str, Tensor], float, float, dict[str, Tensor]]] = []
    for meta_init in (False, True):
        spread = open_spread(source, machine, None, fsdp=True, meta_init=meta_init)
        before = held(spread)
        loss = loss_of(spread.model, segments_of(spread.model, machine.ranks.rank))  # one rank has images
        spread.optimizer.backward(-loss / 20, last=True)
        norm = spread.optimizer.step(1e-2).gradient_norm
        found.append((before, float(loss.detach()), norm, held(spread)))
    whole, blocks = found
    return {
        "before": equal(whole[0], blocks[0]),
        "loss": whole[1] == blocks[1],
        "norm": whole[2] == blocks[2] > 0,
        "after": equal(whole[3], blocks[3]) and not equal(whole[0], whole[3]),
    }


def main() -> None:
    out, models, begun = (Path(word) for word in sys.argv[1:4])
    info = ranks_from_environment()
    machine = Machine("cpu", info, start_process_group(info, torch.device("cpu")))
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for way, strategy in WAYS.items():
            folder = out / family / way.replace(" ", "_")
            passed_on(models / family, begun / family / "step_000001", machine, folder, **strategy)
        results[family] = equal_steps(models / family, machine)
    (out / f"rank_{info.rank}.json").write_text(json.dumps(results))
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
