"""An export is written beside its place, compared there with what it was made from, and then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_models.policy.causal_policy import CausalPolicy

PROBE_TOKENS = 32

ResultT = TypeVar("ResultT")


def whole_or_not_at_all(target: Path, write: Callable[[Path], ResultT]) -> ResultT:
    """Let `write` make a directory beside `target`, which gets its name when that has succeeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # in the target's directory, so that the rename stays within one file system
    staging = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        result = write(staging)
        if target.exists():
            # an empty directory is allowed as the target, and a rename needs it gone
            target.rmdir()
        staging.rename(target)
        return result
    finally:
        # after a rename nothing is left here; after a failure it is the unfinished copy
        shutil.rmtree(staging, ignore_errors=True)


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
        why="an export must equal its source, or it is not written",
        state="nothing was written; the source is unchanged",
        do="report this with the config.json of the model, and the adapter_config.json where there is one",
    )
