"""Numbers of response tokens: in the order of the rollouts, whatever the cut, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from rft_core.errors import ServiceError
from rft_core.keyed_random import uniforms
from rft_trainer.batches.packing import pack
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.sharded_forward import ShardedTokenForward
from rft_trainer.testing.bigram import BigramPolicy, OneRank, TokenCritic
from rft_trainer.update.critic import ValueAnnotator

VOCAB = 7
PATIENCE = 30.0


class ThreadRank:
    """One rank of several that are threads of this process."""

    def __init__(self, rank: int, world_size: int, barrier: Barrier, board: list[bytes]) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._board = barrier, board

    sum = OneRank.sum
    max = OneRank.max

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(PATIENCE)
        parts = list(self._board)
        self._barrier.wait(PATIENCE)
        return parts


def thread_ranks(world_size: int) -> list[ThreadRank]:
    barrier, board = Barrier(world_size), [b""] * world_size
    return [ThreadRank(rank, world_size, barrier, board) for rank in range(world_size)]


def rollout(prompt_id: str, index: int, completion: tuple[int, ...]) -> Rollout:
    zeros = (0.0,) * len(completion)
    return Rollout(prompt_id, index, completion, zeros, zeros, "stop", 0, "", 1.0, RewardStatus.OK)


def groups() -> list[RolloutGroup]:
    """Responses of 0 to 5 tokens; the tokens are numbered through, so that a mix-up shows."""
    made: list[RolloutGroup] = []
    token = 0
    for number in range(4):
        prompt = Prompt(f"p{number}", (1,) * (1 + number), "", None, "test")
        completions: list[tuple[int, ...]] = []
        for index in range(3):
            length = (2 * number + 3 * index) % 6
            completions.append(tuple(range(token, token + length)))
            token += length
        rollouts = tuple(rollout(prompt.prompt_id, i, completion) for i, completion in enumerate(completions))
        made.append(RolloutGroup(prompt, 0, number, rollouts))
    return made


def its_tokens(samples: Sequence[TrainingSample]) -> Tensor:
    """Every token's number is its id over 3, in float32."""
    return pack(samples).token_ids_T.to(torch.float32) / 3


def expected() -> list[tuple[float, ...]]:
    rows = [rollout.completion_ids for group in groups() for rollout in group.rollouts]
    return [tuple((torch.tensor(row, dtype=torch.float32) / 3).tolist()) for row in rows]


@pytest.mark.parametrize(("max_sequences", "max_tokens"), [(100, 0), (1, 0), (5, 9)])
def test_each_rollout_gets_its_own_numbers_whatever_the_cut(max_sequences: int, max_tokens: int) -> None:
    numbers = ShardedTokenForward(its_tokens, OneRank(), max_sequences=max_sequences, max_tokens=max_tokens)
    assert numbers(groups()) == expected()
    assert any(row == () for row in expected())


@pytest.mark.parametrize("world_size", [2, 3, 20])
def test_every_rank_gets_all_numbers_and_computes_its_share_alone(world_size: int) -> None:
    seen: list[list[str]] = [[] for _ in range(world_size)]

    def of_rank(rank: ThreadRank) -> list[tuple[float, ...]]:
        def forward(samples: Sequence[TrainingSample]) -> Tensor:
            seen[rank.rank] += [sample.sample_id for sample in samples]
            return its_tokens(samples)

        return ShardedTokenForward(forward, rank, max_sequences=2, max_tokens=0)(groups())

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(of_rank, thread_ranks(world_size)))
    assert found == [expected()] * world_size
    everything = [sample_id for ids in seen for sample_id in ids]
    assert len(everything) == len(set(everything)) == len(expected())


def test_the_forward_keeps_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    recorded: list[bool] = []

    def forward(samples: Sequence[TrainingSample]) -> Tensor:
        result = its_tokens(samples) * weight
        recorded.append(result.requires_grad)
        return result

    ShardedTokenForward(forward, OneRank(), max_sequences=100, max_tokens=0)(groups())
    assert recorded == [False]


def small_groups() -> list[RolloutGroup]:
    return [
        RolloutGroup(
            g.prompt,
            0,
            g.position,
            tuple(rollout("p", i, tuple(t % VOCAB for t in r.completion_ids)) for i, r in enumerate(g.rollouts)),
        )
        for g in groups()
    ]


@pytest.mark.parametrize("kind", ["values", "logprobs"])
def test_two_ranks_annotate_with_the_bits_of_one(kind: str) -> None:
    policy, critic = BigramPolicy(VOCAB), TokenCritic(VOCAB)
    with torch.no_grad():
        policy.table.copy_(uniforms([3], VOCAB * VOCAB).reshape(VOCAB, VOCAB))
        critic.table.copy_(uniforms([4], VOCAB)[0])

    def annotator(rank: ThreadRank | OneRank) -> ValueAnnotator | LogprobScorer:
        if kind == "values":
            return ValueAnnotator(critic, rank, max_sequences=2, max_tokens=0)
        return LogprobScorer(policy, rank, max_sequences=2, max_tokens=0, temperature=0.7)

    alone = annotator(OneRank())(small_groups())
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: annotator(rank)(small_groups()), thread_ranks(2)))
    assert both == [alone, alone]
    assert [len(row) for row in alone] == [len(r.completion_ids) for g in small_groups() for r in g.rollouts]
    assert any(number != 0 for row in alone for number in row)


@pytest.mark.parametrize("world_size", [1, 2])
def test_logprobs_and_entropies_of_one_forward_are_those_of_two(world_size: int) -> None:
    policy = BigramPolicy(VOCAB)
    with torch.no_grad():
        policy.table.copy_(uniforms([3], VOCAB * VOCAB).reshape(VOCAB, VOCAB))
    alone = LogprobScorer(policy, OneRank(), max_sequences=2, max_tokens=0, temperature=0.7)
    expected_pair = alone(small_groups()), alone.entropies(small_groups())
    forwards: list[int] = []

    def scores(rank: ThreadRank) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        scorer = LogprobScorer(policy, rank, max_sequences=2, max_tokens=0, temperature=0.7)
        forward = scorer._forward
        scorer._forward = lambda samples, **given: (forwards.append(len(samples)), forward(samples, **given))[1]  # type: ignore[method-assign]
        return scorer.with_entropies(small_groups())

    with ThreadPoolExecutor(world_size) as pool:
        assert list(pool.map(scores, thread_ranks(world_size))) == [expected_pair] * world_size
    assert sum(forwards) == len(expected()), "each rollout is in one forward pass, once"


@pytest.mark.parametrize(
    ("max_sequences", "code", "remedy"),
    [(4, "memory.collective_forward", "--micro_rollout_batch_size 2"), (1, "memory.micro_batch", None)],
)
def test_memory_that_runs_out_in_a_collective_forward_names_a_smaller_micro_batch(
    max_sequences: int, code: str, remedy: str | None
) -> None:
    def forward(samples: Sequence[TrainingSample]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    scorer = ShardedTokenForward(forward, OneRank(), max_sequences=max_sequences, max_tokens=0, collective_forward=True)
    with pytest.raises(ServiceError) as caught:
        scorer(groups())
    assert caught.value.problem.code == code
    assert remedy is None or caught.value.problem.do == remedy


def test_memory_that_runs_out_where_ranks_compute_alone_changes_no_number() -> None:
    def within(room: int) -> list[tuple[float, ...]]:
        def forward(samples: Sequence[TrainingSample]) -> Tensor:
            if len(samples) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return torch.cat([torch.tensor(one.token_ids, dtype=torch.float32) for one in samples])

        return ShardedTokenForward(forward, OneRank(), max_sequences=4, max_tokens=0)(groups())

    assert within(1) == within(3) == within(99)
