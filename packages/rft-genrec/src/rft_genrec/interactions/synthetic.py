"""People and items that are made up, on which a model that reads sequences differs from one that counts.

Every item has a sub-category, a brand and a popularity; every person has a persona and a favourite brand. The persona
chooses the table by which sub-categories follow one another, so that the last item alone does not tell the next, but a
few items do; texts carry sub-category and brand and never the persona. As the tables are known, so is the best ranking
that any model can have (`World.probabilities`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rft_core.keyed_random import derive_key
from rft_genrec.catalogue.records import Catalogue
from rft_genrec.interactions.splits import UserSequences
from rft_genrec.interactions.synthetic_texts import BRANDS, SUB_CATEGORIES, item_texts

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ITEMS_A_SUB = 15
NUM_SUBS = sum(map(len, SUB_CATEGORIES.values()))
ZIPF_EXPONENT = 0.8
FEWEST_ITEMS = 5
MEAN_MORE_ITEMS = 6.0
STAY, SUCCESSOR = 0.15, 0.65
"""Chance that the next item is of the same sub-category, and that it is of a successor; otherwise by popularity."""
FIRST_SUCCESSOR = 0.7
"""Share of the first of the two successors."""
BRAND_FACTOR = 9.0
BOUGHT_FACTOR = 0.05
REPEAT = 0.03
"""Chance that the last item is taken once more."""
FIRST_DAY = 1_451_606_400
"""Seconds since 1970 of 2016-01-01."""
_DAY = 86_400
_START_DAYS = 730
_MEAN_GAP_DAYS = 30.0


@dataclass(frozen=True, slots=True)
class World:
    """All that decides what people take; arrays are by item N, sub-category S and persona P."""

    item_subs_N: Integers
    item_brands_N: Integers
    item_shares_N: Floats
    """Popularity of an item in its sub-category; those of a sub-category add up to 1."""
    sub_shares_S: Floats
    successors_PS2: Integers
    """The two sub-categories that follow one for a persona, the likelier one first."""

    @property
    def num_personas(self) -> int:
        """Return the number of kinds of people."""
        return len(self.successors_PS2)

    def catalogue(self, name: str) -> Catalogue:
        """Return the items with their texts."""
        items = zip(self.item_subs_N.tolist(), self.item_brands_N.tolist(), strict=True)
        return Catalogue(
            name, tuple(item_texts(sub, brand, number % ITEMS_A_SUB) for number, (sub, brand) in enumerate(items))
        )

    def sub_probabilities(self, sub: int, persona: int) -> Floats:
        """[S]: chances of the next sub-category after an item of `sub`, the exact repeat apart."""
        chances_S = (1 - STAY - SUCCESSOR) * self.sub_shares_S
        chances_S[sub] += STAY
        first, second = self.successors_PS2[persona, sub]
        chances_S[first] += SUCCESSOR * FIRST_SUCCESSOR
        chances_S[second] += SUCCESSOR * (1 - FIRST_SUCCESSOR)
        return chances_S

    def item_weights(self, brand: int, bought: Sequence[int]) -> Floats:
        """[N]: weights of items in their sub-categories for someone who likes `brand` and has `bought` these."""
        weights_N = self.item_shares_N * np.where(self.item_brands_N == brand, BRAND_FACTOR, 1.0)
        weights_N[np.unique(np.asarray(bought, dtype=np.int64))] *= BOUGHT_FACTOR
        return weights_N

    def probabilities(self, history: Sequence[int], persona: int, brand: int) -> Floats:
        """[N]: chance of each item to come after a history, for a person whose persona and brand are known."""
        last = history[-1]
        weights_N = self.item_weights(brand, history)
        totals_S = np.bincount(self.item_subs_N, weights_N, minlength=NUM_SUBS)
        chances_S = self.sub_probabilities(int(self.item_subs_N[last]), persona) / totals_S
        chances_N = (1 - REPEAT) * chances_S[self.item_subs_N] * weights_N
        chances_N[last] += REPEAT
        return chances_N


@dataclass(frozen=True, slots=True)
class Population:
    """People of a world and what they took."""

    world: World
    personas_U: Integers
    brands_U: Integers
    sequences: UserSequences

    def oracle_ranking(self, user: int, history: Sequence[int]) -> list[int]:
        """Return all items, the likeliest next one first, as the one who knows this person would rank them."""
        chances_N = self.world.probabilities(history, int(self.personas_U[user]), int(self.brands_U[user]))
        return np.argsort(-chances_N, kind="stable").tolist()

    def truth(self) -> dict[str, object]:
        """Return what a model is not shown, as plain values."""
        world = self.world
        names = [name for names in SUB_CATEGORIES.values() for name in names]
        return {
            "sub_categories": names,
            "brands": list(BRANDS),
            "sub_popularity": world.sub_shares_S.tolist(),
            "successors": world.successors_PS2.tolist(),
            "items": {
                "sub_category": world.item_subs_N.tolist(),
                "brand": world.item_brands_N.tolist(),
                "popularity": world.item_shares_N.tolist(),
            },
            "users": {"persona": self.personas_U.tolist(), "brand": self.brands_U.tolist()},
        }


def make_world(personas: int, seed: int) -> World:
    """Draw the items, their popularity, and the successors of every sub-category for every persona."""
    draw = _generator(seed, "synthetic world")
    zipf_S = _zipf(NUM_SUBS)
    sub_shares_S = draw.permutation(zipf_S)
    in_sub = np.concatenate([draw.permutation(_zipf(ITEMS_A_SUB)) for _ in range(NUM_SUBS)])
    successors_PS2 = np.empty((personas, NUM_SUBS, 2), dtype=np.int64)
    for persona in range(personas):
        for sub in range(NUM_SUBS):
            others_S = np.where(np.arange(NUM_SUBS) == sub, 0.0, sub_shares_S)
            successors_PS2[persona, sub] = draw.choice(NUM_SUBS, 2, replace=False, p=others_S / others_S.sum())
    return World(
        item_subs_N=np.repeat(np.arange(NUM_SUBS), ITEMS_A_SUB),
        item_brands_N=draw.integers(len(BRANDS), size=NUM_SUBS * ITEMS_A_SUB),
        item_shares_N=in_sub,
        sub_shares_S=sub_shares_S,
        successors_PS2=successors_PS2,
    )


def make_population(users: int, personas: int, seed: int) -> Population:
    """Draw people and what they took; the draws of one person depend on no other."""
    world = make_world(personas, seed)
    personas_U, brands_U = np.empty(users, dtype=np.int64), np.empty(users, dtype=np.int64)
    items: list[tuple[int, ...]] = []
    times: list[tuple[int, ...]] = []
    for user in range(users):
        draw = _generator(seed, "synthetic user", user)
        personas_U[user], brands_U[user] = draw.integers(personas), draw.integers(len(BRANDS))
        length = FEWEST_ITEMS + int(draw.poisson(MEAN_MORE_ITEMS))
        items.append(_taken(world, int(personas_U[user]), int(brands_U[user]), draw.random((length, 3))))
        start = FIRST_DAY + int(draw.random() * _START_DAYS * _DAY)
        gaps = draw.exponential(_MEAN_GAP_DAYS * _DAY, size=length - 1).astype(np.int64)
        times.append((start, *(start + np.cumsum(gaps)).tolist()))
    names = tuple(f"item{number}" for number in range(len(world.item_subs_N)))
    people = tuple(f"person{number}" for number in range(users))
    return Population(world, personas_U, brands_U, UserSequences(tuple(items), tuple(times), people, names))


def _taken(world: World, persona: int, brand: int, uniforms: Floats) -> tuple[int, ...]:
    """Return the items of one person: a row of three draws, each in [0, 1), decides one of them."""
    weights_N = world.item_weights(brand, [])
    taken: list[int] = []
    for is_repeat, of_sub, of_item in uniforms:
        if taken and is_repeat < REPEAT:
            taken.append(taken[-1])
            continue
        after = world.sub_probabilities(taken[-1] // ITEMS_A_SUB, persona) if taken else world.sub_shares_S
        first = _drawn(after, of_sub) * ITEMS_A_SUB
        item = first + _drawn(weights_N[first : first + ITEMS_A_SUB], of_item)
        if item not in taken:
            weights_N[item] *= BOUGHT_FACTOR
        taken.append(item)
    return tuple(taken)


def _drawn(weights: Floats, uniform: float) -> int:
    """Return the place in which a draw from [0, 1) falls among weights."""
    sums = np.cumsum(weights)
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(weights) - 1)


def _zipf(num: int) -> Floats:
    weights = np.arange(1, num + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    return weights / weights.sum()


def _generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    return np.random.default_rng(derive_key(seed, purpose, *indices) & 0xFFFF_FFFF_FFFF_FFFF)
