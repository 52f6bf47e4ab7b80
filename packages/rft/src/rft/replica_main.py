"""An engine replica's process: `python -m rft.replica_main READ_FD WRITE_FD` (`rft_engine.replicas.worker`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.process.determinism import repeat_exactly
from rft_core.errors import ServiceError
from rft_engine.replicas.worker import ReplicaModel, named, serve_replica
from rft_models.decode.fast_decoder import decoder_for
from rft_models.families.custom import load_model_code
from rft_models.policy.load import load_policy
from rft_models.vision.media import ImageInputs, Media

_NICENESS = 10
"""Of a replica that shares its cores with the trainer, which others wait for."""

_AUTOGROUP = Path("/proc/self/autogroup")
_MOST_TRIES, _TRY_SECONDS = 100, 0.05


def give_way() -> None:
    """Lower this process's scheduling priority below the trainer's.

    Linux with autogroups shares the cores out among sessions first, each with a niceness of its own, and this process
    is the only one of its session: the niceness of the process alone would change nothing.
    """
    os.nice(_NICENESS)
    for _ in range(_MOST_TRIES):
        try:
            _AUTOGROUP.write_text(f"{_NICENESS}")
        except BlockingIOError:  # one session of the machine at a time, ten in a second
            time.sleep(_TRY_SECONDS)
        except OSError:  # a kernel without autogroups
            return
        else:
            return


def make_model(settings: dict[str, Any]) -> ReplicaModel:
    """The architecture in a model directory; its weights come with the first load."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(settings["num_threads"])
    if settings["gives_way"]:
        give_way()
    repeat_exactly(settings["device"])
    load_model_code(settings["model_code"])
    dtype: torch.dtype = getattr(torch, settings["dtype"])
    policy = load_policy(
        settings["model_dir"], dtype=dtype, device=settings["device"], flash_attn=settings["flash_attn"]
    )
    for _, parameter in policy.named_parameters():
        parameter.requires_grad_(False)
    tensors, decoder = named(iter(policy.named_parameters())), decoder_for(policy, graphs=settings["graphs"])
    return ReplicaModel(decoder, tensors, settings["dtype"], settings["device"], received_media)


def received_media(plain: Mapping[str, Any], pixel_values: Sequence[Tensor]) -> Media:
    """A `MakeMedia` of `rft_engine.weight_sync.shared_images`.

    Raises:
        ServiceError: the pixel values are not those that were sent.
    """
    pairs = zip(plain["images"], pixel_values, strict=True)
    return Media(
        images=tuple(_image(one, values) for one, values in pairs),
        spans=tuple((int(first), int(number)) for first, number in plain["spans"]),
        image_token_id=int(plain["image_token_id"]),
    )


def _image(plain: Mapping[str, Any], pixel_values: Tensor) -> ImageInputs:
    grid = plain["grid"]
    frames_rows_columns = None if grid is None else (int(grid[0]), int(grid[1]), int(grid[2]))
    image = ImageInputs.of(pixel_values, frames_rows_columns, int(plain["num_tokens"]))
    if image.digest != plain["digest"]:
        raise ServiceError(
            code="engine.replica.image_damaged",
            what=f"an image has the digest {image.digest[:12]}, {plain['digest'][:12]} was sent",
            where=f"engine replica, {plain['path']}",
            why="samples would be generated from another image than the one that is trained on",
            state="nothing was generated in this call",
            do="--engine_replicas 1 --max_staleness 0: the engine in this process is given the images themselves",
        )
    return image


if __name__ == "__main__":
    serve_replica(int(sys.argv[1]), int(sys.argv[2]), make_model)
