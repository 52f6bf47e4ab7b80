"""Adapters out of checkpoints, and adapters folded into the weights under them; written, read back, compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from rft.checkpoints.verified_export import PROBE_TOKENS, differs, logprob_difference, whole_or_not_at_all
from rft_core.errors import DataError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.files.directories import read_json
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules, rules_of_config
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.reward_model.spec import RECORD

MERGED_LIMIT = 1e-4
"""Nats between the folded matrices and the product of the factors, in float32."""


def export_adapter(source: Path, target: Path) -> list[str]:
    """The adapters of a checkpoint as a directory of their own, which peft loads.

    Raises:
        CheckpointError: no checkpoint at `source` verifies.
        DataError: it holds no adapters, or what was written does not read back.
    """
    checkpoint = resolve_checkpoint(source, asked_by="rft-train export").checkpoint
    folder = checkpoint.model_directory / files.FOLDER
    if not folder.is_dir():
        raise DataError(
            code="export.no_adapter",
            what=f"the checkpoint of step {checkpoint.step} holds no adapters",
            where=str(checkpoint.path),
            why="its run trained the weights themselves (--lora_rank 0)",
            do=f"rft-train export {source} {target}",
        )
    if RECORD in read_json(checkpoint.model_directory / "config.json"):
        raise DataError(
            code="export.reward_adapter",
            what=f"the checkpoint of step {checkpoint.step} is of a reward model",
            where=str(checkpoint.path),
            why="adapters of a reward model score nothing without its head, which is not among them",
            do=f"use {checkpoint.model_directory}, which has the adapters folded in, and the head",
        )
    policy = load_adapted(folder)
    assert policy.adapters is not None

    def write(staging: Path) -> None:
        shutil.copytree(folder, staging)
        written, stored = files.read_tensors(staging), files.read_tensors(folder)
        if written.keys() != stored.keys() or any(not torch.equal(written[name], stored[name]) for name in stored):
            raise differs("tensors are not those of the checkpoint", staging)

    whole_or_not_at_all(target, write)
    size = sum(path.stat().st_size for path in target.iterdir())
    return [
        f"checkpoint  step {checkpoint.step}, {checkpoint.path}",
        f"written     {target}: {size / 1e6:,.2f} MB, adapters of {len(policy.adapters.layers)} layers",
        f"base        {files.base_directory(target)}",
        json.dumps({"step": checkpoint.step, "directory": str(target), "base": policy.where}),
        f"\nnext:\n  rft-train export {target} {target}-merged\n      a model directory with the adapters folded in",
    ]


def export_merged(source: Path, target: Path) -> list[str]:
    """A directory of peft's, folded into its weights, as a complete Hugging Face directory.

    Raises:
        DataError: the weights under it are not there, other adapters than these are needed, or what was written
            computes something else.
    """
    policy = load_adapted(source)
    lines: list[str] = []

    def write(staging: Path) -> None:
        policy.save_pretrained(staging)
        # the weights hold the adapters now: left beside them, these could be added a second time
        shutil.rmtree(staging / files.FOLDER)
        apart = logprob_difference(policy, load_policy(staging, dtype=policy.dtype))
        # merged matrices are rounded to the type of the weights, which shows in narrow types
        limit = MERGED_LIMIT if policy.dtype is torch.float32 else 0.25
        # not `apart > limit`: NaN must be refused as well
        if not apart <= limit:
            raise differs(f"log-probabilities of a probe differ by {apart:.3g} (limit {limit:g})", staging)
        lines.append(f"compared    log-probabilities of {PROBE_TOKENS} tokens {apart:.2g} apart")

    whole_or_not_at_all(target, write)
    return [
        *lines,
        f"written     {target}: {source} folded into {policy.where}",
    ]


def load_adapted(directory: Path) -> CausalPolicy:
    """The policy that a directory of adapters and the weights under it are together."""
    base = files.base_directory(directory)
    rules: AdapterRules = rules_of_config(read_json(directory / files.CONFIG), str(directory))
    policy = load_policy(base, dtype=files.base_dtype(directory))
    # the values drawn here are overwritten by the next line
    adapters = add_adapters(policy, rules, seed=0)
    files.load(adapters, directory)
    return policy.eval()
