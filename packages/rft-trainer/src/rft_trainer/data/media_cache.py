"""Cache of prepared images: prepared on demand, the most recently used ones kept.

Prepared images are some hundred times as large as their files, so those of a whole data set are not held: a prompt
carries a handle, and what it stands for is made again from the file when it is no longer kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rft_trainer.data.images import RowImage

KEPT_FEATURES = 32_768
"""Features of the images that are kept prepared; of patches of 14 pixels, four a feature, about 0.6 GB."""


class PreparedMedia(Protocol):
    """Images prepared for a model's forward."""

    @property
    def num_images(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens, one a feature."""
        ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(first token, number of tokens) of each image's placeholders."""
        ...


@runtime_checkable
class MediaProcessor(Protocol):
    """A tokenizer with the image processor of its model."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` to token ids."""
        ...

    def encode_media(
        self, prompt: str, images: Sequence[bytes], *, where: str = "prompt"
    ) -> tuple[list[int], PreparedMedia | None]:
        """Encode to token ids with one placeholder a feature, and the images or None; `where` is for errors."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredMedia:
    """Handle of one prompt's images: their number, and how to prepare them."""

    store: MediaStore
    text: str
    images: tuple[RowImage, ...]
    where: str
    num_images: int
    num_tokens: int
    image_tokens: tuple[int, ...] = ()
    """Placeholders of each image."""

    def load(self) -> Any:
        """Return the images as the model's forward takes them."""
        return self.store.prepared(self)


class MediaStore:
    """Thread-safe store that prepares the images of prompts and keeps the most recently used ones."""

    def __init__(self, tokenizer: MediaProcessor, *, kept_features: int = KEPT_FEATURES) -> None:
        self._tokenizer = tokenizer
        self._limit = kept_features
        self._kept: OrderedDict[tuple[str, ...], PreparedMedia] = OrderedDict()
        self._num_features = 0
        self._lock = threading.Lock()

    def encode(
        self, text: str, images: tuple[RowImage, ...], *, special: bool, where: str
    ) -> tuple[list[int], StoredMedia | None]:
        """Encode to token ids and a handle; also for a text alone, which may not spell a placeholder itself.

        `special` adds the tokenizer's own tokens to a text alone; one with images holds what its model wants.
        """
        token_ids, media = self._encode(text, images, where)
        if media is None:
            # a text alone is encoded again where the tokenizer's own tokens are wanted
            return (self._tokenizer.encode(text, add_special_tokens=True) if special else token_ids), None
        each = tuple(number for _, number in media.spans)
        stored = StoredMedia(self, text, images, where, media.num_images, media.num_tokens, each)
        # prepared once for the token ids anyway, so the first rollouts may find it
        self._keep(_key(stored), media)
        return token_ids, stored

    def prepared(self, stored: StoredMedia) -> PreparedMedia:
        """Return the images of a handle, prepared again if they are no longer kept."""
        key = _key(stored)
        with self._lock:
            media = self._kept.get(key)
            if media is not None:
                self._kept.move_to_end(key)
                return media
        # outside of the lock: two threads may prepare the same images, and `_keep` stores them once
        _, media = self._encode(stored.text, stored.images, stored.where)
        assert media is not None
        assert media.num_tokens == stored.num_tokens, "the same images have the same features"
        self._keep(key, media)
        return media

    def _encode(self, text: str, images: tuple[RowImage, ...], where: str) -> tuple[list[int], PreparedMedia | None]:
        return self._tokenizer.encode_media(text, [image.read() for image in images], where=where)

    def _keep(self, key: tuple[str, ...], media: PreparedMedia) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = media
            self._num_features += media.num_tokens
            # one stays even if it alone is above the limit: it is in use now
            while self._num_features > self._limit and len(self._kept) > 1:
                self._num_features -= self._kept.popitem(last=False)[1].num_tokens


def _key(stored: StoredMedia) -> tuple[str, ...]:
    return (stored.text, *(image.digest for image in stored.images))


def stored_media(media: object) -> StoredMedia | None:
    """Return the images of a prompt where they are a handle, else None: there are none, or they are prepared."""
    return media if isinstance(media, StoredMedia) else None


def image_files(media: Any) -> tuple[bytes, ...]:
    """Return the encoded images of a handle or of prepared media; none for None.

    Raises:
        DataError: see `RowImage.read`.
    """
    stored = stored_media(media)
    if stored is not None:
        return tuple(image.read() for image in stored.images)
    return tuple(getattr(media, "files", ()))


def image_digests(media: Any) -> list[str]:
    """Return the SHA-256 of each image of a handle, for the identity of rows; none where there is no handle."""
    stored = stored_media(media)
    return [] if stored is None else [image.digest for image in stored.images]


def media_of(media: Sequence[Any]) -> list[object | None] | None:
    """Return the images of each prompt as an engine takes them, None where it has none; None where no prompt has any.

    What several prompts share is loaded once.
    """
    if all(one is None for one in media):
        return None
    # by identity, as the samples of a prompt share its handle
    loaded = {key: load_media(one) for key, one in {id(one): one for one in media}.items()}
    return [loaded[id(one)] for one in media]


def load_media(media: Any) -> Any:
    """Return the prepared images of a handle, or anything else as it is."""
    stored = stored_media(media)
    return media if stored is None else stored.load()
