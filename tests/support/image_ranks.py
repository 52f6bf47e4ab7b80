"""The program of one rank: a forward and backward of rows with images, which one rank has and the other has not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_core.packed_tokens import PackedTokens
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.settings import SequenceMode
from rft_dist.strategies.fsdp import FullyShardedModel
from rft_dist.strategies.sequence_parallel import SequenceGroup
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor

torch.set_num_threads(1)
CPU = torch.device("cpu")
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl")
MODES: tuple[SequenceMode, ...] = ("ulysses", "ring")
Segments = list[tuple[list[int], int, Media | None]]


def segments_of(policy: CausalPolicy, rank: int) -> Segments:
    """Rank 0: two samples with one image and a row of text; rank 1: text alone."""
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    pixels = torch.arange(16 * 24 * 3, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8).view(16, 24, 3)
    seen, media = tokenizer.encode_media("<image>what is it? ", [Image.fromarray(pixels.numpy())])
    text = tokenizer.encode("without one ")
    rows = [(seen, "a cat", media), (seen, "two dogs", media), (text, "fine", None)]
    rows = rows if rank == 0 else [(text, "as it is", None), (text, "good", None)]
    return [(prompt + tokenizer.encode(answer), len(prompt), images) for prompt, answer, images in rows]


def loss_of(policy: CausalPolicy, segments: Segments) -> Tensor:
    """Sum of log-probs, weighted by their place."""
    lengths = [len(tokens) for tokens, _, _ in segments]
    wanted = [torch.arange(length) >= prompt for length, (_, prompt, _) in zip(lengths, segments, strict=True)]
    logprobs, _ = policy.token_logprobs(
        PackedTokens(
            torch.tensor([token for tokens, _, _ in segments for token in tokens]),
            torch.cat([torch.arange(length) for length in lengths]),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            torch.cat(wanted),
            mm_inputs=tuple(media for _, _, media in segments),
        ),
    )
    return (logprobs * torch.linspace(0.5, 1.5, len(logprobs))).sum()


def gradients_of(policy: CausalPolicy) -> dict[str, Tensor]:
    """Whole ones; LLaVA leaves the tower's last norm unused."""
    found: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if (grad := parameter.grad) is None:
            continue
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return found


def alone(directory: Path, text_weight: float) -> dict[str, Tensor]:
    """What one process has for the rows of rank 0, and those of rank 1 so many times."""
    policy = load_policy(directory)
    loss = loss_of(policy, segments_of(policy, 0))
    (loss + text_weight * loss_of(policy, segments_of(policy, 1))).backward()
    return gradients_of(policy)


def main() -> None:
    out, models = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = start_process_group(ranks_from_environment(), CPU)
    for family in FAMILIES:
        policy = load_policy(models / family)
        sharded = FullyShardedModel(policy.model, policy.layers, ranks, device=CPU)
        policy.wrap_forward(sharded.compute)
        loss_of(policy, segments_of(policy, ranks.rank)).backward()
        loss_of(policy, segments_of(policy, 1)).backward()  # nobody has an image
        save_file(gradients_of(policy), out / f"fsdp_{family}_{ranks.rank}.safetensors")
        for mode in MODES:
            policy = load_policy(models / family)
            policy.enable_sequence_parallel(SequenceGroup(ranks, ranks.world_size), mode)
            loss_of(policy, segments_of(policy, 0)).backward()
            save_file(gradients_of(policy), out / f"{mode}_{family}_{ranks.rank}.safetensors")
    stop_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
