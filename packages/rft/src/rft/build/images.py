"""Images from settings: their column and processor, and the settings that are refused beside images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rft.build.models import tokenizer_of
from rft_core.errors import OptionsError
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import choose_strategy
from rft_models.families.custom import load_model_code
from rft_models.settings import ModelSettings, WeightsSettings
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.compatibility import refuse_other_inputs
from rft_models.vision.image_files import PixelRules
from rft_models.vision.processor import HfProcessor, load_vision_processor
from rft_trainer.data.image_placeholders import check_images
from rft_trainer.data.images import ImageColumn, RowImage, images_of
from rft_trainer.data.prompts import PromptRow
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.settings.images import (
    ControlledImageSettings,
    GenerateImageSettings,
    ImageSettings,
    RowImageSettings,
    ScoredImageSettings,
)
from rft_trainer.tasks.shuffled_images import shuffle_images


@dataclass(frozen=True, slots=True)
class ImageReading:
    """Image column of the rows and the control experiment; without a column rows have no images."""

    column: ImageColumn | None = None
    shuffle_seed: int | None = None
    """The control experiment; None = every row keeps its own images."""

    def arranged(self, rows: Sequence[PromptRow]) -> Sequence[PromptRow]:
        """Return the rows, their images exchanged for the control experiment where it is on."""
        return rows if self.shuffle_seed is None else shuffle_images(rows, self.shuffle_seed)


def row_images(settings: RowImageSettings, seed: int) -> ImageReading:
    """Return the reading of images that the settings select."""
    if not settings.images_key:
        return ImageReading()
    shuffles = isinstance(settings, ControlledImageSettings | ScoredImageSettings) and settings.shuffle_images
    column = ImageColumn(settings.images_key, settings.limit_mm_image_per_prompt, settings.mixed_mm_data)
    return ImageReading(column, seed if shuffles else None)


def tokenizer_with_images(model: WeightsSettings, images: ImageSettings) -> HfTokenizer:
    """The tokenizer of the model, with its image processor where rows have images.

    Raises:
        DataError: the model takes no images, or its files are absent or damaged.
        OptionsError: pillow or torchvision is not installed, or a cap on pixels has no effect with this model.
    """
    if not _has_images(images):
        return tokenizer_of(model)
    load_model_code(model.model_code)
    pixels = PixelRules(max_pixels=images.max_pixels or None, min_pixels=images.min_pixels or None)
    return load_vision_processor(model.pretrain, pixels=pixels)


def refuse_beside_images(
    images: ImageSettings,
    strategy: StrategySettings,
    model: ModelSettings,
    tokenizer: HfTokenizer,
    *,
    critic: str = "",
) -> None:
    """Refuse settings that cannot be used with images, before a model loads; `critic` is the critic's own directory.

    Raises:
        OptionsError: a critic that takes other images, a router loss, or matrices in parts, beside images.
    """
    if not images.images_key:
        return
    assert isinstance(tokenizer, HfProcessor)
    if critic:
        refuse_other_inputs(tokenizer, critic, flag="--critic_pretrain")
    if model.aux_loss_coef:
        why = "no vision-language model here is a mixture of experts, so there is no router to balance"
        raise _refused("router_loss", f"aux_loss_coef = {model.aux_loss_coef:g}", why, "--aux_loss_coef 0")
    chosen = choose_strategy(strategy)
    num_parts = chosen.group_sizes(strategy).matrix
    if num_parts > 1:
        name = chosen.matrix_setting
        why = "only a decoder's matrices are cut; --fsdp and --zero_stage divide those of the vision tower too"
        raise _refused("parts", f"{name} = {num_parts}", why, f"--{name} 1 --fsdp")


def _refused(kind: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=f"images.{kind}", what=f"{what} beside images_key", where="--images_key", why=why, do=do)


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """Number and tokens of the images of rendered rows."""

    num_images: int
    num_rows: int
    """With images."""
    tokens_an_image: tuple[float, float]
    """Fewest and most, each the mean of a row."""
    longest_row: int
    """Tokens of the longest row with images."""


def image_counts(rendered: Sequence[RenderedPrompt]) -> ImageCounts | None:
    """Count the images of the rows, and their tokens; None without any."""
    rows = [(row.media, len(row.token_ids)) for row in rendered if row.media is not None]
    if not rows:
        return None
    means = [media.num_tokens / media.num_images for media, _ in rows]
    return ImageCounts(
        num_images=sum(media.num_images for media, _ in rows),
        num_rows=len(rows),
        tokens_an_image=(min(means), max(means)),
        longest_row=max(length for _, length in rows),
    )


def given_images(images: GenerateImageSettings, prompt: str) -> tuple[RowImage, ...]:
    """The images that are named beside one prompt.

    Raises:
        DataError: a file that is no image, or another number of them than the prompt has places.
    """
    names = [name.strip() for name in images.image.split(",") if name.strip()]
    row = Row({"image": names, "prompt": prompt}, "--image", 1)
    column = ImageColumn("image", images.limit_mm_image_per_prompt, mixed=True)
    row_images = images_of(row, column)
    check_images(row, "prompt", column, [prompt], len(row_images))
    return row_images


def _has_images(images: ImageSettings) -> bool:
    return bool(images.images_key) or (isinstance(images, GenerateImageSettings) and bool(images.image))
