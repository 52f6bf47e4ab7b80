"""Adapters out of checkpoints, and adapters folded into the weights under them; written, read back, compared."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.files.directories import read_json
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules, rules_of_config
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy

PROBE_TOKENS = 32
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
        shutil.rmtree(staging / files.FOLDER)
        apart = logprob_difference(policy, load_policy(staging, dtype=policy.dtype))
        limit = MERGED_LIMIT if policy.dtype is torch.float32 else 0.25
        if not apart <= limit:
            raise differs(f"log-probabilities of a probe differ by {apart:.3g} (limit {limit:g})", staging)
        lines.append(f"compared    log-probabilities of {PROBE_TOKENS} tokens {apart:.2g} apart")

    whole_or_not_at_all(target, write)
    return [
        *lines,
        f"written     {target}: {source} folded into {policy.where}",
        f"\nnext:\n  rft-train rl --pretrain {target} --prompt_data train.jsonl\n      train on from it",
    ]


def load_adapted(directory: Path) -> CausalPolicy:
    """The policy that a directory of adapters and the weights under it are together."""
    base = files.base_directory(directory)
    rules: AdapterRules = rules_of_config(read_json(directory / files.CONFIG), str(directory))
    policy = load_policy(base, dtype=files.base_dtype(directory))
    adapters = add_adapters(policy, rules, seed=0)
    files.load(adapters, directory)
    return policy.eval()


@torch.no_grad()
def logprob_difference(first: CausalPolicy, second: CausalPolicy) -> float:
    """Return the largest log-prob difference of two policies over a probe of random tokens, in nats."""
    size = min(first.model.config.get_text_config().vocab_size, 2**31)
    tokens = torch.randint(size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    probe = PackedTokens.of_segments([tokens])
    one, other = (policy.eval().token_logprobs(probe)[0] for policy in (first, second))
    return float((one - other).abs().max())


def differs(what: str, where: Path) -> DataError:
    """Return the error that an export differs from its source."""
    return DataError(
        code="export.differs",
        what=what,
        where=str(where),
        why="an export is what it was made from, or it is not written",
        state="nothing was written",
        do="report this with the adapter_config.json",
    )


def whole_or_not_at_all(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a directory beside `target`, which gets its name when that has succeeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        write(staging)
        if target.exists():
            target.rmdir()
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
