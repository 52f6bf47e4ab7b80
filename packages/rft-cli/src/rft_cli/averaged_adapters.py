"""The moving averages of adapters (`--enable_ema` with `--lora_rank`), folded into the weights under them.

What is averaged are the factors A and B themselves (and DoRA's lengths), as they are what is trained; the model that
is written has (mean of B) (mean of A), which is not the mean of B A.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rft_cli.exporting_adapter import MERGED_LIMIT, differs, load_adapted, logprob_difference, whole_or_not_at_all
from rft_core.errors import OptionsError
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.optim import ema
from rft_models.lora import files
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy


def has_adapters(checkpoint: Checkpoint) -> bool:
    """Whether its run trained adapters."""
    return (checkpoint.model_directory / files.FOLDER).is_dir()


def export_averaged(checkpoint: Checkpoint, target: Path, dtype_name: str = "") -> None:
    """A complete Hugging Face directory with the averaged adapters folded in, and below it they alone.

    `dtype_name`: the type that the folded weights are written in; empty = as they are.

    Raises:
        OptionsError: the checkpoint has no averages of its adapters.
        DataError: what was written computes something else.
    """
    policy = load_adapted(checkpoint.model_directory / files.FOLDER)
    _take_averages(policy, checkpoint)

    def write(staging: Path) -> None:
        policy.save_pretrained(staging)
        apart = logprob_difference(policy, load_policy(staging, dtype=policy.dtype))
        limit = MERGED_LIMIT if policy.dtype is torch.float32 else 0.25
        if not apart <= limit:
            raise differs(f"log-probabilities of a probe differ by {apart:.3g} (limit {limit:g})", staging)
        if dtype_name:
            load_policy(staging, dtype=getattr(torch, dtype_name)).save_pretrained(staging)
        print(f"compared    log-probabilities of a probe {apart:.2g} apart")

    whole_or_not_at_all(target, write)
    print(f"checkpoint  step {checkpoint.step}, {checkpoint.path}")
    print(f"written     {target}: the averaged adapters folded into {policy.where}")
    print(f"\nnext:\n  rft-train rl --pretrain {target} --prompt_data train.jsonl\n      train on from it")


@torch.no_grad()
def _take_averages(policy: CausalPolicy, checkpoint: Checkpoint) -> None:
    assert policy.adapters is not None
    reader = checkpoint.blocks("optimizer")
    names = {key.removeprefix(f"{ema.KIND}/"): key for key in reader.table if key.startswith(f"{ema.KIND}/")}
    parameters = dict(policy.adapters.named_parameters())
    if names.keys() != parameters.keys():
        raise OptionsError(
            code="export.no_averages",
            what=f"step {checkpoint.step} holds {len(names) or 'no'} moving averages of its {len(parameters)} adapters",
            where=f"--ema, {checkpoint.path}",
            why="averages of adapters are kept while a run trains with --enable_ema",
            do=f"rft-train export {checkpoint.path} DIR (the adapters themselves), or train with --enable_ema",
        )
    for name, key in names.items():
        parameters[name].copy_(reader.whole(key))
