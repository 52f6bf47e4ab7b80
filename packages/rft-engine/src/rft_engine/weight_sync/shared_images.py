"""Images for replicas in processes of their own: each sent once, in shared memory, by digest.

The trainer's side writes the pixel values of an image into a file in the layout of safetensors; a call names the file
and gives the position of the image in its prompt; the replica maps the file and makes the model's own record of it.
Both sides keep the images of the present call: the next one, of mostly the same prompts, finds them there.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from rft_core.errors import ServiceError
from rft_engine.weight_sync.private_folder import remove_empty_folders
from rft_engine.weight_sync.weight_file import own_path, read_weight_file, write_weight_file

_NAME = "pixel_values"


class ImageParts(Protocol):
    """One image as a model takes it."""

    @property
    def pixel_values(self) -> Tensor: ...
    @property
    def grid(self) -> tuple[int, int, int] | None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def digest(self) -> str:
        """Digest of pixel values, grid and number of tokens."""
        ...


class MediaParts(Protocol):
    """The images of a prompt."""

    @property
    def images(self) -> Sequence[ImageParts]: ...
    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(first token, number of tokens) of each."""
        ...

    @property
    def image_token_id(self) -> int: ...


PlainMedia = Mapping[str, Any]
"""JSON: images (path, digest, grid, num_tokens), spans, image_token_id."""

MakeMedia = Callable[[PlainMedia, Sequence[Tensor]], object]
"""The model's own record of the images of a prompt, from their description and their pixel values."""


@dataclass(frozen=True, slots=True)
class SharedImage:
    """The images of a prompt of a call."""

    media: Any
    """As the trainer has them, for engines that are given them in this process."""
    plain: PlainMedia = field(default_factory=dict[str, Any])
    """For replicas with a process of their own; empty where there is none."""


def distinct(media: Sequence[object | None]) -> tuple[list[object], list[int]]:
    """Return the distinct entries, and for each entry its index among them; -1 for None.

    Equal digests are the same images.
    """
    index_by_key: dict[tuple[object, ...], int] = {}
    unique: list[object] = []
    indices: list[int] = []
    by_identity: dict[int, int] = {}
    for one in media:
        if one is None:
            indices.append(-1)
            continue
        # most entries are one object a prompt, once for each sample: its key is made once
        index = by_identity.get(id(one))
        if index is None:
            index = by_identity[id(one)] = index_by_key.setdefault(_key(one), len(unique))
            if index == len(unique):
                unique.append(one)
        indices.append(index)
    return unique, indices


class SharedImageStore:
    """Images in shared memory, for the calls to come; one thread at a time."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._serial = 0

    @property
    def num_images(self) -> int:
        """Images that are held."""
        return len(self._paths)

    def hold(self, media: Sequence[object]) -> list[PlainMedia]:
        """Write images that are not stored yet, drop those that are in none of `media`; return descriptions of all.

        Raises:
            StorageError: there is no room for them.
        """
        if not self._serial and media:
            atexit.register(self.close)
        parts = [cast(MediaParts, one) for one in media]
        wanted = {image.digest: image for one in parts for image in one.images}
        # before new ones are written: the images of two calls may not fit together
        for digest in [digest for digest in self._paths if digest not in wanted]:
            self._paths.pop(digest).unlink(missing_ok=True)
        for digest, image in wanted.items():
            if digest not in self._paths:
                self._paths[digest] = self._write(image)
        return [self._plain(one) for one in parts]

    def close(self) -> None:
        """Delete all images. Does nothing the second time."""
        atexit.unregister(self.close)
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        self._paths.clear()
        remove_empty_folders()

    def _write(self, image: ImageParts) -> Path:
        self._serial += 1
        size = image.pixel_values.numel() * image.pixel_values.element_size()
        path = own_path(f"images-{id(self):x}-{self._serial}", 2 * size)
        try:
            write_weight_file(path, [(_NAME, image.pixel_values)], 1)
        except BaseException:
            # half a file would take shared memory until this process ends
            path.unlink(missing_ok=True)
            raise
        return path

    def _plain(self, media: MediaParts) -> PlainMedia:
        return {
            "images": [
                {
                    "path": str(self._paths[image.digest]),
                    "digest": image.digest,
                    "grid": None if image.grid is None else list(image.grid),
                    "num_tokens": image.num_tokens,
                }
                for image in media.images
            ],
            "spans": [list(span) for span in media.spans],
            "image_token_id": media.image_token_id,
        }


class ReceivedMedia:
    """The replica's side: records of the model, their pixel values mapped."""

    def __init__(self, make: MakeMedia | None) -> None:
        self._make = make
        self._pixels: dict[str, Tensor] = {}

    def of_call(self, shown: Sequence[PlainMedia]) -> list[object]:
        """The images of the prompts of a call; pixels of earlier calls that are not among them go.

        Raises:
            ServiceError: this replica's model takes no images.
        """
        if not shown:
            self._pixels.clear()
            return []
        if self._make is None:
            raise _takes_none(len(shown))
        paths = {image["digest"]: image["path"] for one in shown for image in one["images"]}
        # what is mapped already is kept by digest; a mapping that is let go of frees the pages of a deleted file
        self._pixels = {digest: self._found(digest, path) for digest, path in paths.items()}
        return [self._make(one, [self._pixels[image["digest"]] for image in one["images"]]) for one in shown]

    def _found(self, digest: str, path: str) -> Tensor:
        cached = self._pixels.get(digest)
        return read_weight_file(path)[_NAME] if cached is None else cached


def _key(media: object) -> tuple[object, ...]:
    parts = cast(MediaParts, media)
    return (*(image.digest for image in parts.images), *parts.spans, parts.image_token_id)


def _takes_none(num: int) -> ServiceError:
    return ServiceError(
        code="engine.replica.no_images",
        what=f"{num} prompts have images, but this replica's model takes none",
        where="draw of an engine replica",
        why="images reach a model through its vision tower",
        state="nothing was drawn",
        do="--engine_replicas 1 --max_staleness 0",
    )
