"""Texts of pairs as a reward model reads them, with handles of the images of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft.build.images import ImageReading
from rft_models.reward_model.encoding import RewardTextEncoder
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.media import Media
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.media_cache import MediaStore, StoredMedia
from rft_trainer.data.preference_rows.preferences import LoadedPairs
from rft_trainer.data.prompts import PromptRow
from rft_trainer.data.rendering import place_of, with_places


class PairTextEncoder(RewardTextEncoder):
    """Encoder of the texts of pairs; the images of their prompts are prepared when they are used."""

    def __init__(self, tokenizer: HfTokenizer, reading: ImageReading | None = None) -> None:
        super().__init__(tokenizer)
        self._reading = reading or ImageReading()
        self._store = MediaStore(_PairImages(self))

    @property
    def column(self) -> ImageColumn | None:
        """Return the column of images; None where rows have none."""
        return self._reading.column

    def arranged(self, loaded: LoadedPairs) -> LoadedPairs:
        """Return the pairs, their images exchanged for the control experiment where it is on."""
        prompts = self._reading.arranged(loaded.prompts)
        pairs = (replace(pair, prompt=prompt) for pair, prompt in zip(loaded.pairs, prompts, strict=True))
        return replace(loaded, pairs=tuple(pairs))

    def encode_row(self, prompt: PromptRow, response: str) -> tuple[list[int], StoredMedia | None]:
        """Encode a prompt with a response: the tokens that scoring reads later, and a handle of the images.

        Raises:
            DataError: tokenizer, template or image processor cannot take it, with the file, line and field of an image.
        """
        placed = with_places(prompt)
        text = self.text(placed.text or "", [message.as_dict() for message in placed.messages or ()], response)
        return self._store.encode(text, prompt.images, special=False, where=place_of(prompt))


@dataclass(frozen=True, slots=True)
class _PairImages:
    """An encoder in the place of a tokenizer with an image processor."""

    encoder: RewardTextEncoder

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text without images."""
        return self.encoder.encode_text(text)[0]

    def encode_media(
        self, prompt: str, images: Sequence[Any], *, where: str = "prompt"
    ) -> tuple[list[int], Media | None]:
        """Encode the text of a pair with its images; the second text of a pair has those of the first."""
        return self.encoder.encode_text(prompt, tuple(images), where=where)
