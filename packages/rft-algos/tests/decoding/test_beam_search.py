from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.beam_search import Beams, Expansion, expand
from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_algos.input_checks import InputError

VOCAB = 9


def table(prefix: tuple[int, ...], seed: int) -> list[float]:
    """Log-probs after a prefix, any but always the same."""
    numbers = random.Random(f"{seed} {prefix}")
    scores = [numbers.gauss(0, 2) for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


def searched(trie: TokenTrie, width: int, seed: int, mass: str = "vocabulary") -> list[tuple[tuple[int, ...], float]]:
    """A whole search for one prompt: (sequence, score), best first."""
    beams, prefixes = Beams.start(1), [()]
    for _ in range(trie.depth + 2):  # two more than needed: whole sequences stay as they are
        logprobs = torch.tensor([[table(prefix, seed) for prefix in prefixes]], dtype=torch.float64)
        found = expand(beams, logprobs, trie, width, mass=mass)  # type: ignore[arg-type]
        parents, tokens = found.parents_PK[0].tolist(), found.tokens_PK[0].tolist()
        prefixes = [(*prefixes[p], *([t] if t >= 0 else [])) for p, t in zip(parents, tokens, strict=True)]
        beams = found.beams
    assert bool(beams.are_done(trie).all())
    scores = beams.scores_PK[0].tolist()
    return [(prefix, score) for prefix, score in zip(prefixes, scores, strict=True) if score > -math.inf]


def score_of(sequence: tuple[int, ...], seed: int) -> float:
    return sum(table(sequence[:i], seed)[token] for i, token in enumerate(sequence))


def catalogue(seed: int) -> list[tuple[int, ...]]:
    """Sequences of two to four tokens, all ending with token 8 and nowhere else."""
    numbers = random.Random(seed)
    return sorted({(*(numbers.randrange(4) for _ in range(numbers.randint(1, 3))), 8) for _ in range(30)})


@pytest.mark.parametrize("seed", range(12))
def test_a_width_of_all_sequences_gives_them_all_in_the_order_of_their_scores(seed: int):
    sequences = catalogue(seed)
    found = searched(TokenTrie.of(sequences), len(sequences) + 5, seed)
    expected = sorted(((s, score_of(s, seed)) for s in sequences), key=lambda pair: -pair[1])
    assert [s for s, _ in found] == [s for s, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_narrow_search_equals_a_plain_one(width: int, seed: int):
    sequences = catalogue(seed)
    kept: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(5):
        longer: list[tuple[tuple[int, ...], float]] = []
        for prefix, score in kept:
            following = sorted(
                {s[len(prefix)] for s in sequences if s[: len(prefix)] == prefix and len(s) > len(prefix)}
            )
            longer += [((*prefix, t), score + table(prefix, seed)[t]) for t in following] or [(prefix, score)]
        kept = sorted(longer, key=lambda pair: -pair[1])[:width]
    found = searched(TokenTrie.of(sequences), width, seed)
    assert [s for s, _ in found] == [s for s, _ in kept]
    assert [score for _, score in found] == pytest.approx([score for _, score in kept], rel=1e-12)


@pytest.mark.parametrize("width", [1, 7, 100])
def test_results_are_valid_and_distinct_at_any_width(width: int):
    for seed in range(20):
        sequences = catalogue(seed)
        found = [s for s, _ in searched(TokenTrie.of(sequences), width, seed)]
        assert len(found) == len(set(found)) <= min(width, len(sequences))
        assert set(found) <= set(sequences)
        # a finite tree loses beams only where a prefix kept has fewer ends than places
        assert found


def test_with_the_mass_of_what_is_allowed_probabilities_of_all_sequences_add_up_to_one():
    sequences = catalogue(3)
    scores = [score for _, score in searched(TokenTrie.of(sequences), 50, 3, "allowed")]
    assert sum(map(math.exp, scores)) == pytest.approx(1.0, rel=1e-12)
    assert sum(map(math.exp, (score for _, score in searched(TokenTrie.of(sequences), 50, 3)))) < 0.9


def one_step(beams: Beams, logprobs: Tensor, width: int) -> Expansion:
    return expand(beams, logprobs, TokenTrie.of([[0], [2, 1]]), width)


def test_a_step_by_hand():
    logprobs = torch.tensor([[[0.5, 0.3, 0.2]]]).log().requires_grad_()
    first = one_step(Beams.start(1), logprobs, 3)
    assert first.tokens_PK.tolist() == [[0, 2, -1]]
    assert first.parents_PK[0, :2].tolist() == [0, 0]
    assert first.beams.scores_PK.tolist() == [[pytest.approx(math.log(0.5)), pytest.approx(math.log(0.2)), -math.inf]]
    assert first.logprobs_PK.tolist() == [[pytest.approx(math.log(0.5)), pytest.approx(math.log(0.2)), 0.0]]
    assert first.log_mass_PK.tolist() == [[pytest.approx(math.log(0.7)), pytest.approx(math.log(0.7)), 0.0]]
    assert first.beams.states_PK[0, 2] == ROOT
    assert first.beams.are_done(TokenTrie.of([[0], [2, 1]])).tolist() == [[True, False, True]]
    assert not first.beams.scores_PK.requires_grad
    # the whole beam stays, whatever the model says after it, NaN included
    after = torch.stack([torch.full((3,), math.nan), logprobs[0, 0].detach(), torch.full((3,), math.nan)])[None]
    second = one_step(first.beams, after, 2)
    assert second.tokens_PK.tolist() == [[-1, 1]]
    assert second.parents_PK.tolist() == [[0, 1]]
    assert second.logprobs_PK.tolist() == [[0.0, pytest.approx(math.log(0.3))]]
    assert second.log_mass_PK.tolist() == [[0.0, pytest.approx(math.log(0.3))]]
    assert second.beams.scores_PK.tolist() == [[pytest.approx(math.log(0.5)), pytest.approx(math.log(0.06))]]


def test_equal_scores_keep_their_order_and_prompts_do_not_mix():
    trie = TokenTrie.of(list(itertools.product(range(3), range(3))))
    same = torch.full((2, 1, 3), math.log(1 / 3))
    same[1, 0] = torch.tensor([0.1, 0.2, 0.7]).log()
    found = expand(Beams.start(2), same, trie, 2)
    assert found.tokens_PK.tolist() == [[0, 1], [2, 1]]
    with pytest.raises(InputError, match="width must be at least 1"):
        expand(found.beams, same, trie, 0)


def test_a_tree_without_enough_candidates_pads_and_never_repeats():
    trie = TokenTrie.of([[1, 2], [1, 3]])
    first = expand(Beams.start(1), torch.zeros(1, 1, 4).log_softmax(-1), trie, 4)
    assert (first.beams.scores_PK > -math.inf).tolist() == [[True, False, False]]  # as many places as candidates
    second = expand(first.beams, torch.zeros(1, 3, 4).log_softmax(-1), trie, 4)
    assert second.tokens_PK.tolist() == [[2, 3, -1, -1]]
    assert second.logprobs_PK[0, 2:].tolist() == [0.0, 0.0]
    assert second.beams.states_PK.tolist() == [[trie.state_of([1, 2]), trie.state_of([1, 3]), ROOT, ROOT]]
    assert bool(second.beams.are_done(trie).all())


def test_logits_with_their_normaliser_are_log_probs() -> None:
    trie = TokenTrie.of([[1, 3], [2, 3], [2, 4]])
    logits = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(0))
    given = expand(Beams.start(2), logits.log_softmax(-1), trie, 3)
    found = expand(Beams.start(2), logits, trie, 3, log_normaliser_PK=logits.logsumexp(-1))
    torch.testing.assert_close(found.beams.scores_PK, given.beams.scores_PK)
    torch.testing.assert_close(found.logprobs_PK, given.logprobs_PK)
    torch.testing.assert_close(found.log_mass_PK, given.log_mass_PK)
    assert found.tokens_PK.tolist() == given.tokens_PK.tolist()
