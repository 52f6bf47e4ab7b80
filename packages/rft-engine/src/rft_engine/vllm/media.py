"""Prompts with images for vLLM, which prepares images itself and expands each one's placeholder.

A call carries them as plain data, so that it can go to a process of its own. The prompt that vLLM
read is compared with the one that is trained on: vLLM's placeholders must be as many as the trainer's, in the same
places.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rft_core.errors import PreflightError, ServiceError, install_command
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.protocols import PromptMedia

PlainMedia = Mapping[str, Any]
"""token_ids: the prompt with one placeholder an image; files: base64 of each image; options: of the processor."""


def plain_media(prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None) -> list[dict[str, Any] | None]:
    """Return the value of `GenerateCall.media`; an empty list where no prompt has images."""
    if media is None or not any(one is not None for one in media):
        return []
    return [
        None if one is None else _plain(prompt, cast(PromptMedia, one))
        for prompt, one in zip(prompts, media, strict=True)
    ]


def takes_images(settings: ExternalEngineSettings) -> bool:
    """Return True when the model of these settings has a vision tower."""
    return "vision_config" in settings.config()


def request_of(prompt: Sequence[int], plain: PlainMedia | None) -> dict[str, Any]:
    """A prompt as vLLM takes it.

    Raises:
        PreflightError: pillow is not installed where vLLM is.
    """
    if plain is None:
        return {"prompt_token_ids": list(prompt)}
    request: dict[str, Any] = {
        "prompt_token_ids": list(plain["token_ids"]),
        "multi_modal_data": {"image": [_decoded(file) for file in plain["files"]]},
    }
    if plain["options"]:
        request["mm_processor_kwargs"] = dict(plain["options"])
    return request


def check_expanded(sample: int, prompt: Sequence[int], read: Sequence[int]) -> None:
    """Raise `ServiceError` where vLLM has read another prompt than the one that is trained on."""
    # log-probs are trained at the positions of `prompt`: one placeholder more would shift all of them
    if list(read) == list(prompt):
        return
    # where one is the beginning of the other, they differ where the shorter one ends
    shorter = min(len(prompt), len(read))
    index = next((position for position in range(shorter) if prompt[position] != read[position]), shorter)
    raise ServiceError(
        code="engine.vllm.placeholders",
        what=f"sample {sample}: vLLM read {len(read)} prompt tokens, {len(prompt)} were expected; "
        f"they differ at {index}",
        where="vLLM engine, prompt with images",
        why="vLLM's image processor must give each image the placeholders that the trainer counts",
        state="no sample of this call was used",
        do="--engine_type native, or leave --max_pixels and --min_pixels out",
    )


def _plain(prompt: Sequence[int], media: PromptMedia) -> dict[str, Any]:
    return {
        "token_ids": media.collapsed(prompt),
        "files": [base64.b64encode(file).decode() for file in media.files],
        "options": dict(media.processor_options),
    }


def _decoded(file: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise PreflightError(
            code="engine.no_pillow",
            what="pillow is not installed",
            where="vLLM engine, prompt with images",
            why="vLLM takes images as PIL images",
            do=install_command("vision"),
        ) from error
    return Image.open(io.BytesIO(base64.b64decode(file))).convert("RGB")
