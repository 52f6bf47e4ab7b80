"""People and items that are made up."""

import itertools
import json

import numpy as np
import pytest

from rft_genrec.interactions.headroom import headroom, measure
from rft_genrec.interactions.splits import Shares, split_by_time
from rft_genrec.interactions.synthetic import ITEMS_A_SUB, NUM_SUBS, Population, make_population
from rft_genrec.interactions.synthetic_texts import BRANDS, item_texts


@pytest.fixture(scope="module")
def people() -> Population:
    return make_population(users=600, personas=4, seed=42)


def test_the_draws_of_one_person_depend_on_no_other(people: Population) -> None:
    fewer = make_population(users=3, personas=4, seed=42)
    assert fewer.sequences.items == people.sequences.items[:3]
    assert fewer.sequences.times == people.sequences.times[:3]
    assert make_population(3, 4, 43).sequences.items != fewer.sequences.items


def test_the_items_are_those_of_the_description(people: Population) -> None:
    catalogue = people.world.catalogue("made")
    assert len(catalogue) == NUM_SUBS * ITEMS_A_SUB == 900
    assert len({item.title for item in catalogue.items}) == 900
    assert item_texts(1, 0, 3).text == (
        f"{BRANDS[0]} stainless watering can A stainless watering can by {BRANDS[0]}, one of its products for garden."
    )
    assert {len(times) for times in people.sequences.times} >= set(range(6, 15))
    assert all(list(times) == sorted(times) for times in people.sequences.times)


def test_chances_add_up_and_rank_as_the_tables_say(people: Population) -> None:
    world = people.world
    chances_N = world.probabilities([4, 33], persona=2, brand=1)
    assert np.isclose(chances_N.sum(), 1)
    of_subs = np.bincount(world.item_subs_N, chances_N)
    first, second = world.successors_PS2[2, 33 // ITEMS_A_SUB]
    assert of_subs.argmax() == first
    assert np.isclose(of_subs[second], 0.97 * (0.65 * 0.3 + 0.2 * world.sub_shares_S[second]))
    assert (
        people.oracle_ranking(0, [4, 33])[0]
        == world.probabilities([4, 33], int(people.personas_U[0]), int(people.brands_U[0])).argmax()
    )


def test_people_take_what_their_chances_say(people: Population) -> None:
    """The share of transitions to the first successor is 0.97 x (0.65 x 0.7 + a little by popularity)."""
    world = people.world
    followed, steps = 0, 0
    for persona, items in zip(people.personas_U.tolist(), people.sequences.items, strict=True):
        subs = [item // ITEMS_A_SUB for item in items]
        steps += len(subs) - 1
        followed += sum(int(world.successors_PS2[persona, a, 0]) == b for a, b in itertools.pairwise(subs))
    assert 0.43 < followed / steps < 0.48


def test_only_who_knows_the_person_ranks_well(people: Population) -> None:
    samples = split_by_time(people.sequences, 10, Shares())
    counted, markov, oracle = headroom(people, samples["train"], samples["test"])
    assert 0.47 < oracle.hit_rate < 0.60
    assert 0.27 < oracle.ndcg < 0.37
    assert oracle.hit_rate > 2 * max(counted.hit_rate, markov.hit_rate)
    assert measure("none", lambda sample: np.zeros(900), []).hit_rate == 0


def test_the_truth_is_plain(people: Population) -> None:
    truth = json.loads(json.dumps(people.truth()))
    assert len(truth["users"]["persona"]) == 600
    assert len(truth["successors"]) == people.world.num_personas == 4
