"""What a replica's process answers is checked before it is handed out; garbage is a typed error of that replica."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_core.exact_records import exact_line
from rft_engine.native.partial_requests import SampleRequests
from rft_engine.replicas.process import ProcessReplica, is_lost
from rft_engine.weight_sync.shared_memory import WeightSnapshot

VOCAB, VERSION = 7, 3
OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(0,))
CALL = SampleRequests([(1,), (2,)], [10, 11], [0, 0], [3, 2], OPTIONS)
FIRST = {
    "request": 0,
    "token_ids": [4, 5, 6],
    "logprobs": [-1.0, -2.0, -0.5],
    "log_kept_mass": [0.0, -0.1, 0.0],
    "finish_reason": "length",
    "weight_version": VERSION,
}
STOPPED = FIRST | {"request": 1, "token_ids": [0], "logprobs": [-1.0], "log_kept_mass": [0.0], "finish_reason": "stop"}
NO_TURN = FIRST | {
    "request": 1,
    "token_ids": [],
    "logprobs": [],
    "log_kept_mass": [],
    "finish_reason": "interrupted",
}
DONE = json.dumps({"reply": {}})

Answering = Callable[..., ProcessReplica]


def items(*results: Any) -> list[str]:
    """The lines of a call with these results."""
    return [exact_line({"item": result}).decode() for result in results] + [DONE]


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """Make a started replica whose process answers each request, after start and load, with the next lines."""
    made: list[ProcessReplica] = []

    def start(*answers: Sequence[str]) -> ProcessReplica:
        facts = {"dtype": "float32", "vocab_size": VOCAB, "is_cpu": True, "transport": "file"}
        lines = [[json.dumps({"reply": facts})], [DONE], *answers]
        code = (
            "import os, sys\n"
            "requests, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), 'w')\n"
            f"for line, lines in zip(requests, {lines!r}):\n"
            "    print(*lines, sep='\\n', file=answers, flush=True)\n"
            "requests.readline()\n"
        )
        command = [sys.executable, "-S", "-c", code]
        made.append(ProcessReplica(0, command, {}, max_rows=2, max_len=8, log_path=tmp_path / "log"))
        made[0].ready()
        made[0].load(WeightSnapshot(VERSION, tmp_path / "weights", {}, 0))
        return made[0]

    yield start
    for replica in made:
        replica.close()


def test_results_are_handed_out_as_they_came(answering: Answering) -> None:
    replica = answering(items(None, STOPPED, FIRST), items(FIRST, NO_TURN))
    [second, first] = replica.draw(CALL)
    assert (second.request, second.token_ids, second.finish_reason) == (1, (0,), "stop")
    assert (first.request, first.token_ids, first.logprobs) == (0, (4, 5, 6), (-1.0, -2.0, -0.5))
    [_, begun] = replica.draw(CALL)
    assert (begun.request, begun.token_ids, begun.finish_reason) == (1, (), "interrupted")


@pytest.mark.parametrize(
    "lines",
    [
        items(FIRST | {"request": 2}),
        items(STOPPED | {"request": -1}),
        items(FIRST | {"request": False}),
        items(FIRST | {"request": None}),
        items(STOPPED, STOPPED),
        items(FIRST, NO_TURN, FIRST),
        items(FIRST | {"token_ids": [4, 5, VOCAB]}),
        items(FIRST | {"token_ids": [4, -1, 6]}),
        items(FIRST | {"token_ids": [4.0, 5, 6]}),
        items(FIRST | {"token_ids": None}),
        items(FIRST | {"request": 1}),
        items(NO_TURN | {"finish_reason": "length"}),
        items(FIRST | {"logprobs": [-1.0, -2.0]}),
        items(FIRST | {"logprobs": [-1.0, math.nan, -0.5]}),
        items(FIRST | {"logprobs": [-1.0, -math.inf, -0.5]}),
        items(FIRST | {"logprobs": [-1.0, "-2.0", -0.5]}),
        items(FIRST | {"logprobs": [-1.0, 2.0, -0.5]}),
        items(FIRST | {"log_kept_mass": [0.0, math.nan, 0.0]}),
        items(FIRST | {"finish_reason": "stop"}),
        items(STOPPED | {"finish_reason": "length"}),
        items(FIRST | {"finish_reason": "gone"}),
        items(FIRST | {"weight_version": VERSION - 1}),
        items(FIRST | {"weight_version": None}),
        items(FIRST | {"more": 1}),
        items({"request": 0}),
        items([1, 2]),
    ],
)
def test_what_cannot_be_a_result_of_the_call_is_garbage(answering: Answering, lines: Sequence[str]) -> None:
    replica = answering(lines)
    with pytest.raises(ServiceError) as caught:
        list(replica.draw(CALL))
    assert caught.value.problem.code == "engine.garbage"
    assert is_lost(caught.value), "another replica draws its samples"


@pytest.mark.parametrize("line", ["no json at all", '{"item": ', "[1, 2]", "3", "{}", '"item"'])
def test_lines_that_are_no_messages_are_garbage_whatever_was_asked(answering: Answering, line: str) -> None:
    replica = answering([line], [line])
    for ask in (lambda: list(replica.draw(CALL)), replica.wake):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.problem.code == "engine.garbage"
        assert is_lost(caught.value)
