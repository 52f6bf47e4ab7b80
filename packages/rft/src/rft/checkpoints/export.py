"""A checkpoint's model as a Hugging Face directory of its own, compared with what it was made from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from rft.checkpoints.ema_weights import TensorsWithEma, export_averaged, has_adapters, take_averages
from rft.checkpoints.export_reward_model import compared_scores, is_reward_checkpoint, refuse_averages
from rft.checkpoints.verified_export import PROBE_TOKENS, differs, logprob_difference, whole_or_not_at_all
from rft_core.errors import CheckpointError, OptionsError
from rft_dist.checkpoint_format.resharding import BlockReader, table_of_files
from rft_dist.checkpoint_format.safetensors_pieces import tensor_bytes
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.reader import Checkpoint
from rft_models.policy.load import load_policy
from rft_models.reward_model.loading import load_reward_model


def export(source: Path, target: Path, dtype_name: str = "", *, averages: bool = False) -> list[str]:
    """Write `target` whole or not at all: it is made beside its place, compared there, and renamed.

    `averages`: with the moving averages of the weights in their place.

    Raises:
        CheckpointError: no checkpoint at `source` verifies.
        DataError: what was written does not read back as what it was made from.
        OptionsError: averages are asked for, and the checkpoint has none.
    """
    checkpoint = _checkpoint_at(source)
    if averages and has_adapters(checkpoint):
        return export_averaged(checkpoint, target, dtype_name)
    stored = weights_of(checkpoint.model_directory)
    dtype = getattr(torch, dtype_name) if dtype_name else _widest(stored)
    if is_reward_checkpoint(checkpoint):
        if averages:
            raise refuse_averages(checkpoint)
        return whole_or_not_at_all(target, lambda staging: _write_reward(checkpoint, target, staging, stored, dtype))

    def write(staging: Path) -> list[str]:
        policy = load_policy(checkpoint.model_directory, dtype=dtype)
        expected = take_averages(policy, checkpoint, stored) if averages else stored
        policy.save_pretrained(staging)
        # read back from the disk: what counts is what was written
        written = weights_of(staging)
        _compare_weights(expected, written, staging)
        digest = _hash_of(written)
        # the same weights in the same forward: any difference is a fault, so there is no tolerance
        apart = logprob_difference(policy, load_policy(staging, dtype=dtype))
        if not apart == 0.0:
            raise differs(f"log-probabilities of a probe differ by {apart:.3g}", staging)
        return _report(checkpoint, target, staging, written, apart, digest)

    return whole_or_not_at_all(target, write)


def _write_reward(
    checkpoint: Checkpoint, target: Path, staging: Path, stored: BlockReader, dtype: torch.dtype
) -> list[str]:
    """Write the reward model of a checkpoint to `staging`, and compare tensors and scores."""
    load_reward_model(checkpoint.model_directory, dtype=dtype).save_pretrained(staging)
    written = weights_of(staging)
    _compare_weights(stored, written, staging)
    digest = _hash_of(written)
    apart = compared_scores(checkpoint, str(staging), dtype)
    return _report(checkpoint, target, staging, written, apart, digest, of="scores of a probe")


def weights_of(directory: Path) -> BlockReader:
    """The tensors of a Hugging Face directory's own files; a critic in a folder below is not among them."""
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    return BlockReader(directory, table_of_files(directory, files))


def _widest(stored: BlockReader) -> torch.dtype:
    names = {entry.dtype for entry in stored.table.values()}
    return next(
        (dtype for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16)) if name in names), torch.float16
    )


def _compare_weights(stored: BlockReader | TensorsWithEma, written: BlockReader, where: Path) -> None:
    """Compare names, shapes and bytes; with another dtype, the bytes of the stored tensors after the conversion."""
    if set(stored.table) != set(written.table):
        difference = sorted(set(stored.table) ^ set(written.table))
        raise differs(f"{len(difference)} tensors are in one only, the first {difference[0]}", where)
    for name in sorted(stored.table):
        have = written.full_tensor(name)
        # in the type that was written, so that only a conversion that was asked for is allowed
        want = stored.full_tensor(name).to(have.dtype)
        if not _same_bytes(want, have):
            raise differs(f"tensor {name} {list(have.shape)} {have.dtype} does not have the bytes it was given", where)


def _hash_of(written: BlockReader) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in name order, one in memory at a time."""
    digest = hashlib.sha256()
    for name in sorted(written.table):
        entry = written.table[name]
        digest.update(f"{name}|{entry.dtype}|{list(entry.shape)}|".encode())
        digest.update(tensor_bytes(written.full_tensor(name)))
    return digest.hexdigest()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    # bytes in place of values: NaN is not equal to itself, and 0.0 equals -0.0
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _checkpoint_at(source: Path) -> Checkpoint:
    try:
        return resolve_checkpoint(source, asked_by="rft-train export").checkpoint
    except CheckpointError as error:
        if (source / "config.json").is_file():
            raise OptionsError(
                code="export.is_model",
                what=f"{source} is a model directory already",
                where="command line",
                why="an export makes one out of a run, a checkpoint or adapters",
                state="nothing was written",
                do=f"--pretrain {source}",
            ) from error
        raise


def _report(
    checkpoint: Checkpoint,
    target: Path,
    staging: Path,
    written: BlockReader,
    apart: float,
    digest: str,
    of: str = f"log-probabilities of {PROBE_TOKENS} tokens",
) -> list[str]:
    size = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    kinds = sorted({entry.dtype for entry in written.table.values()})
    return [
        f"checkpoint  step {checkpoint.step}, {checkpoint.path}",
        f"written     {target}: {size / 1e6:,.1f} MB, {len(written.table)} tensors, {', '.join(kinds)}",
        f"compared    every tensor to the bit, {of} {apart:g} apart",
        json.dumps({"step": checkpoint.step, "directory": str(target), "sha256": digest}),
    ]
