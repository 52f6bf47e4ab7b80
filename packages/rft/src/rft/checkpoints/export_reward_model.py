"""A checkpoint's reward model as a directory of its own, compared with what it was made from."""

from __future__ import annotations

import json

import torch

from rft.checkpoints.verified_export import PROBE_TOKENS, differs
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_dist.checkpoints.reader import Checkpoint
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.spec import RECORD


def is_reward_checkpoint(checkpoint: Checkpoint) -> bool:
    """Return whether the model of a checkpoint is a reward model, whose config.json says what its head computes."""
    file = checkpoint.model_directory / "config.json"
    return file.is_file() and RECORD in json.loads(file.read_text())


def refuse_averages(checkpoint: Checkpoint) -> OptionsError:
    """Return the error of moving averages that are asked for of a reward model."""
    return OptionsError(
        code="export.no_reward_averages",
        what=f"{checkpoint.path} is of a reward model",
        where="--ema",
        why="moving averages are exported of policies",
        do=f"rft-train export {checkpoint.path} DIR (the weights themselves)",
    )


@torch.no_grad()
def score_difference(first: RewardModel, second: RewardModel) -> float:
    """Return the largest difference of two reward models' scores of a probe of random tokens."""
    size = min(first.model.config.get_text_config(decoder=True).vocab_size, 2**31)
    tokens = torch.randint(size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).to(first.device)
    probe = PackedTokens.of_segments([tokens])
    one, other = (
        model.score_matrix(probe) if model.spec.steps is None else model.step_scores(probe) for model in (first, second)
    )
    return float((one - other).abs().max())


def compared_scores(checkpoint: Checkpoint, written: str, dtype: torch.dtype) -> float:
    """Return the difference of the scores of a checkpoint and of what was written, which is 0.

    Raises:
        DataError: they differ, or what the head computes does.
    """
    source, copy = load_reward_model(checkpoint.model_directory, dtype=dtype), load_reward_model(written, dtype=dtype)
    apart = score_difference(source, copy)
    # not `apart != 0`: NaN must be refused as well
    if not apart == 0.0 or source.spec != copy.spec:
        raise differs(f"scores of a probe differ by {apart:.3g}", checkpoint.path)
    return apart
