"""Control experiment for images: each row gets the images of another row, so that they carry no information."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rft_core.errors import DataError
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.data.prompts import PromptRow


def shuffle_images(rows: Sequence[PromptRow], seed: int) -> list[PromptRow]:
    """Shuffle the images between rows; no row keeps its own.

    They change places among the rows of the same question and number of images where there are at least two of them,
    else among all that are left with this number. No row keeps its own.

    Raises:
        DataError: a row has no other row to change with.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.images:
            groups.setdefault((len(row.images), row.text, row.messages), []).append(index)
    left: dict[int, list[int]] = {}
    source_of: dict[int, int] = {}
    for members in groups.values():
        if len(members) == 1:
            left.setdefault(len(rows[members[0]].images), []).extend(members)
        else:
            source_of |= _rotated(members, seed)
    # those whose question nobody else asks change places among themselves
    for members in left.values():
        if len(members) == 1:
            raise _single(rows[members[0]])
        source_of |= _rotated(members, seed)
    return [replace(row, images=rows[source_of.get(index, index)].images) for index, row in enumerate(rows)]


def _rotated(members: Sequence[int], seed: int) -> dict[int, int]:
    """Map each member to its neighbour in a random cycle."""
    order = [members[i] for i in permutation(derive_key(seed, "shuffle-images", members[0]), len(members)).tolist()]
    # a rotation of a random order, since a random permutation may leave some where they are
    return {member: order[index - 1] for index, member in enumerate(order)}


def _single(row: PromptRow) -> DataError:
    return DataError(
        code="data.alone_to_shuffle",
        what=f"{row.prompt_id} is the only row left with {len(row.images)} images",
        where=row.images[0].where,
        why="with shuffle_images its images go to another row that has as many",
        do="leave --shuffle_images out, or give more rows",
    )
