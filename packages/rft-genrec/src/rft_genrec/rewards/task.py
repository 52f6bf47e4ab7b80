"""The reward as a function of an installed task: it runs in a scoring process and reads its files once.

The row of a prompt carries what it needs in its column `extras`::

    {"catalogue": "data/tools", "weights": {"rule": 1, "ranking": 1}, "history": [4, 9]}

and, where a term asks for it, `prefix_values`, `embeddings` (an `.npy` file), `scorer` ("module:function", called with
`scorer_path`, which returns an `ItemScorer`). The label is the ID of the target of the same row, so that no other row,
of whatever split, can take its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.errors import OptionsError
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.rewards.mixture import GroupReward
from rft_genrec.rewards.terms import PREFIX_VALUES
from rft_trainer.installed_tasks.discovery import function

Value = dict[str, Any] | None
"""Reward and parts; None for a response that is no item, which becomes a response without a reward."""

_OF_A_ROW = ("history",)
"""What differs between the rows of one reward."""


def score(responses: Sequence[str], labels: Sequence[str], *, extras: Sequence[Mapping[str, Any] | str]) -> list[Value]:
    """Score all responses to one prompt; the part "correctness" is 1 for the ID of the target, else 0.

    Args:
        responses: texts in the order of the group.
        labels: the ID of the target, once a response.
        extras: the column of the row, once a response; a mapping or its JSON.

    Returns:
        One value a response, as a reward function returns it.
    """
    first = extras[0]
    row: Mapping[str, Any] = json.loads(first) if isinstance(first, str) else first
    settings = {name: value for name, value in row.items() if name not in _OF_A_ROW}
    reward = _reward(json.dumps(settings, sort_keys=True))
    found, wanted = reward(responses, labels[0], row.get("history", ())), reward.read(labels[0])
    return [
        # whatever the terms and their weights are, only the item that was taken is right
        {"reward": one.value, "parts": {**one.parts, "correctness": float(reward.read(response) == wanted)}}
        if one.value is not None
        else None
        for response, one in zip(responses, found, strict=True)
    ]


@cache
def _reward(settings: str) -> GroupReward:
    """Return the reward of these settings, a JSON object; files are read once a process."""
    chosen: dict[str, Any] = json.loads(settings)
    dataset = read_dataset(chosen["catalogue"])
    if dataset.ids is None:
        raise OptionsError(
            code="genrec.reward_ids",
            what=f"{chosen['catalogue']} has no semantic IDs",
            where="catalogue of the reward",
            why="a response is compared with the ID of an item",
            do="a catalogue with an .index.json",
        )
    scorer = chosen.get("scorer", "")
    return GroupReward(
        dataset.ids,
        chosen.get("weights", {"rule": 1.0}),
        tuple(chosen.get("prefix_values", PREFIX_VALUES)),
        embeddings_ND=np.load(Path(chosen["embeddings"])) if "embeddings" in chosen else None,
        scorer=function(scorer)(chosen.get("scorer_path", "")) if scorer else None,
    )
