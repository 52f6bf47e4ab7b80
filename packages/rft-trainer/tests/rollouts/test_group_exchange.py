"""Groups that ranks exchange arrive as they were: every token, every bit of a float, in the order of the ledger."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.rollouts.group_exchange import (
    ExchangedGroups,
    encode_error,
    encode_groups,
    exchange_groups,
    group_from_json,
    in_order,
)

ENTRIES = [LedgerEntry(1, position, 9 - position) for position in range(4)]
PROMPTS = [Prompt(f"p:{i}", (i, i + 1), "text", "label", "here", media=object()) for i in range(4)]


def rollout(index: int, logprobs: Sequence[float], **fields: object) -> Rollout:
    """One response with these log-probs."""
    made = Rollout(
        prompt_id="p",
        sample_index=index,
        completion_ids=tuple(range(70_000, 70_000 + len(logprobs))),
        behaviour_logprobs=tuple(logprobs),
        log_kept_mass=tuple(-0.5 for _ in logprobs),
        finish_reason="stop",
        weight_version=3,
        response_text="né\n",
        reward=0.1,
        status=RewardStatus.OK,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


CONVERSATION = rollout(
    1,
    [-0.25, 0.0, -1.5],
    reward=None,
    status=RewardStatus.FAILED,
    detail="env.py:3",
    breakdown={"correctness": 1.0},
    steps=((2, 0.3),),
    version_spans=((3, 1), (4, 2)),
    turns=(Turn(True, 1, "a", 0.5, 1, 0, 0.25), Turn(False, 1, "b"), Turn(True, 1, "c")),
)
FLOATS = {
    "float32": [-0.5, -0.0, 0.0, struct.unpack("f", struct.pack("f", -0.1))[0], -math.inf],
    "float64": [-0.1, -1 / 3, 5e-324, -1.7976931348623157e308, 0.0],
    "none": [],
}


def group(number: int, *rollouts: Rollout, baseline: float | None = None) -> RolloutGroup:
    """The group of one entry."""
    return RolloutGroup(PROMPTS[number], ENTRIES[number].epoch, ENTRIES[number].position, rollouts, baseline)


def bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


class Ranks:
    """Two ranks, of which the second has sent its groups already."""

    rank, world_size = 0, 2

    def __init__(self, other: bytes) -> None:
        self.other = other
        self.sent = 0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent += len(data)
        return [data, self.other]


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_keep_their_bits(kind: str) -> None:
    sent = group(0, rollout(0, FLOATS[kind]), rollout(1, FLOATS["float32"]))
    [got] = in_order([ExchangedGroups(encode_groups([sent]))], ENTRIES[:1], PROMPTS[:1])
    assert [bits(one.behaviour_logprobs) for one in got.rollouts] == [
        bits(one.behaviour_logprobs) for one in sent.rollouts
    ]
    assert got == sent


def test_a_number_that_is_none_arrives() -> None:
    [got] = in_order([ExchangedGroups(encode_groups([group(0, rollout(0, [math.nan]))]))], ENTRIES[:1], PROMPTS[:1])
    assert math.isnan(got.rollouts[0].behaviour_logprobs[0])


def test_rewards_keep_their_bits() -> None:
    odd = replace(rollout(0, [-1.0]), reward=-0.0, breakdown={"a": math.inf, "b": -math.inf}, steps=((0, 5e-324),))
    data = encode_groups([group(0, odd, baseline=0.1)])
    [got] = in_order([ExchangedGroups(data)], ENTRIES[:1], PROMPTS[:1])
    assert got.rollouts == (odd,)
    assert math.copysign(1.0, float(str(got.rollouts[0].reward))) == -1.0
    assert got.baseline_reward == 0.1
    assert b"Infinity" not in data, "floats are no text"


def test_every_field_of_a_conversation_arrives() -> None:
    sent = group(2, CONVERSATION, rollout(2, [-1.0]), baseline=0.75)
    [got] = in_order([ExchangedGroups(encode_groups([sent]))], ENTRIES[2:3], PROMPTS[2:3])
    assert got == sent
    assert got.prompt is PROMPTS[2]


def test_all_ranks_have_all_groups_in_the_order_of_the_ledger() -> None:
    groups = [group(number, rollout(0, [-number / 3] * number), CONVERSATION) for number in range(4)]
    ranks = Ranks(encode_groups([groups[1], groups[3]]))
    assert exchange_groups(ranks, [groups[0], groups[2]], ENTRIES, PROMPTS) == groups  # type: ignore[arg-type]


def test_a_rank_without_groups_sends_none() -> None:
    groups = [group(number, rollout(0, [-1.0])) for number in range(2)]
    assert exchange_groups(Ranks(encode_groups(groups)), [], ENTRIES[:2], PROMPTS[:2]) == groups  # type: ignore[arg-type]


def test_an_error_takes_the_place_of_groups() -> None:
    assert ExchangedGroups(encode_error({"what": "w", "do": "d"})).error == {"what": "w", "do": "d"}
    assert ExchangedGroups(encode_groups([])).error is None


def test_a_token_costs_sixteen_bytes_where_its_floats_are_float32() -> None:
    short, long = group(0, rollout(0, [-0.5])), group(0, rollout(0, [-0.5] * 101))
    more = len(encode_groups([long])) - len(encode_groups([short]))
    assert 1600 <= more < 1620  # a few digits of the counts


def test_a_group_that_was_stored_as_json_comes_back_with_its_prompt() -> None:
    prompt = replace(PROMPTS[2], media=None, messages=({"role": "user", "content": "text"},))
    stored = replace(group(2, CONVERSATION, rollout(2, [-0.1]), baseline=0.75), prompt=prompt)
    assert group_from_json(json.loads(json.dumps(asdict(stored)))) == stored
    without = asdict(stored)
    del without["prompt"]["messages"]  # as it was stored before there were any
    assert group_from_json(without).prompt == replace(prompt, messages=())
