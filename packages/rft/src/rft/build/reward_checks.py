"""Checks of rewards beside images: a text-only reward model or judge would score images that it does not see."""

from __future__ import annotations

from rft.reward_names import model_places
from rft.settings import EvalSettings, RlSettings
from rft_core.errors import OptionsError
from rft_models.families.vision import is_vision
from rft_models.files.directories import existing_directory, read_json


def has_images(settings: RlSettings | EvalSettings) -> bool:
    """Return True when prompts may hold images."""
    return bool(settings.images.images_key)


def require_image_rewards(settings: RlSettings | EvalSettings) -> None:
    """Refuse reward models and a judge of this process that take no images where prompts hold images.

    Servers are tried on an image before the run begins.

    Raises:
        OptionsError: one takes no images.
        DataError: no directory, or a damaged config.json.
    """
    if not has_images(settings):
        return
    directories = [("reward_pretrain", directory.place) for directory in model_places(settings.reward_models)]
    if settings.judge.judge_pretrain:
        directories.append(("judge_pretrain", settings.judge.judge_pretrain))
    for flag, directory in directories:
        file = existing_directory(directory) / "config.json"
        kind = str(read_json(file).get("model_type", "")) if file.is_file() else ""
        if kind and not is_vision(kind):
            raise _blind(flag, directory, kind, settings.images.images_key)


def _blind(flag: str, place: str, kind: str, images_key: str) -> OptionsError:
    wanted_model = "a vision-language reward model" if flag == "reward_pretrain" else "a vision-language model"
    return OptionsError(
        code="reward.no_images",
        what=f"{flag} = {place} (model_type {kind}) takes no images here, and prompts hold those of {images_key}",
        where=f"--{flag}",
        why="it would judge answers about images that it does not see",
        do=f"--{flag} DIR of {wanted_model}, or --reward file.py:function, which may ask for images",
    )
