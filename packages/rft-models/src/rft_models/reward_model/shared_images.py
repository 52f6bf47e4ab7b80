"""Preparation of images once for several texts about them, as a reward model reads the samples of a prompt.

A response takes no image, whatever it spells: markers in it are read as text.
"""

from __future__ import annotations

from collections.abc import Sequence

from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.media import Media
from rft_models.vision.processor import MARKER, HfProcessor

OTHER_MARKER = "(image)"
"""Text that replaces a marker in a response."""


class SharedImages(HfProcessor):
    """A tokenizer that prepares the images of neighbouring texts once, where they are the same files.

    Example::

        shared = SharedImages(tokenizer)
        first, again = (shared.encode_shared(text, images) for text in ("<image>one", "<image>two"))
    """

    def __init__(self, tokenizer: HfProcessor) -> None:
        super().__init__(tokenizer, tokenizer.processor, tokenizer.family, tokenizer.image_token_id, tokenizer.pixels)
        self._last: tuple[tuple[bytes, ...], Media] | None = None

    def encode_shared(
        self, text: str, images: tuple[bytes, ...], *, where: str = "prompt"
    ) -> tuple[list[int], Media | None]:
        """Encode as `encode_media`, with the last text's images where they are the same files."""
        collapsed = self._as_processor_does(self._with_own_markers(text))
        # read once: another thread may put its own text here meanwhile
        last = self._last
        # the same tuple needs no comparison of its files, which may be megabytes
        same = last is not None and (last[0] is images or last[0] == images)
        if last is None or not images or not same or collapsed.count(self.image_token_id) != len(images):
            token_ids, media = self.encode_media(text, images, where=where)
            self._last = (images, media) if media is not None else None
            return token_ids, media
        return _expanded(collapsed, last[1])  # pixel values of the last text: nothing is prepared again

    def of_response(self, text: str) -> str:
        """Return a text without any word that this model reads as the placeholder of an image."""
        for word in (MARKER, self.processor.image_token):
            text = text.replace(word, OTHER_MARKER)
        return text


def shared_images_of(tokenizer: HfTokenizer) -> SharedImages | None:
    """Return the shared preparation for a tokenizer with an image processor; None for one of text."""
    return SharedImages(tokenizer) if isinstance(tokenizer, HfProcessor) else None


def _expanded(collapsed: Sequence[int], like: Media) -> tuple[list[int], Media]:
    """Return the tokens with placeholder n as often as image n has features, and the media of this text."""
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for token in collapsed:
        number = 1
        if token == like.image_token_id:
            number = like.images[len(spans)].num_tokens
            spans.append((len(token_ids), number))
        token_ids += [token] * number
    media = Media(like.images, tuple(spans), like.image_token_id, like.files, like.processor_options)
    return token_ids, media
