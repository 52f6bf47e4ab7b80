"""Drawn faults of numbers, many of them: every one is caught, and the step is that of a run that never met it.

`rl` is the policy's loss and its critic's, `sft` the supervised one, `pretrain` that with its term over the vocabulary;
each on one rank and on two. The counts of docs/reliability.md are those of the night; RFT_NIGHT_SHARE takes a part.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from support.guarded_steps import Rank, keep, on, spoils
from torch import Tensor

from rft_core.errors import NumericsError
from rft_dist.collectives import TorchCollectives
from rft_trainer.batches.packing import count, num_filler_batches, rank_micro_batches
from rft_trainer.batches.units import MicroBatching, optimizer_batches, unit_lengths, units_of
from rft_trainer.records.rollouts import TokenBatch, TrainingSample
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchOutput
from rft_trainer.update.weight_check import WeightCheck

COMMANDS = {"rl": ("policy", "critic"), "sft": ("supervised",), "pretrain": ("pretrain",)}
STAGES = {
    "loss": "loss",
    "gradient": "gradient of the weights",
    "old_logprobs": "input old_logprobs",
    "token_advantages": "input advantages",
    "old_values": "input old_values",
    "returns": "input returns",
}
"""Where a value is planted, and what is named first."""
WRONG = (math.nan, math.inf, -math.inf)
MARKER = 0
RUNS = [(command, world_size) for command in COMMANDS for world_size in (1, 2)]


def cases(few: int, many: int) -> pytest.MarkDecorator:
    """So many cases of each command on each number of ranks: few in the test command, a share of `many` at night."""
    share = float(os.environ.get("RFT_NIGHT_SHARE", "1"))
    number = max(1, round(many * share / len(RUNS)))
    night = [pytest.mark.night, pytest.mark.timeout(6 * 3600)]
    return pytest.mark.parametrize("number", [few, pytest.param(number, marks=night, id="night")])


def each_run(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize(("command", "world_size"), RUNS)(test)


def drawn(rng: Random, name: str, *, marked: bool = False) -> TrainingSample:
    length = rng.randint(1, 6)
    response = [rng.randint(2, 5) for _ in range(length)]
    if marked:
        response[rng.randrange(length)] = MARKER
    return TrainingSample(
        name,
        (1, *response),
        1,
        rng.choice([1.0, -0.5, 0.25]),
        old_logprobs=(-1.8,) * length,
        old_values=(0.25,) * length,
        returns=tuple(rng.random() for _ in range(length)),
        token_advantages=tuple(rng.uniform(-1, 1) for _ in range(length)),
    )


def batch(rng: Random, step: str) -> list[TrainingSample]:
    return [drawn(rng, f"{step}:{number}") for number in range(rng.randint(4, 8))]


def drawn_cut(rng: Random) -> MicroBatching:
    return MicroBatching(rng.randint(1, 5), rng.choice([0, 21]), rng.random() < 0.5)


def equal(found: Tensor, expected: Tensor) -> bool:
    # another cut of the batch adds in another order
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


def require(ends: list[Counter[str]], number: int, *, least: dict[str, float]) -> None:
    """Every rank saw the same; no case went wrong, and of each kind there are at least these shares."""
    assert all(end == ends[0] for end in ends)
    assert {name for name in ends[0] if name.startswith("wrong")} == set(), ends[0]
    assert all(ends[0][name] >= share * number for name, share in least.items()), ends[0]
    print(number, dict(ends[0]))


@each_run
@cases(8, 5400)
def test_n1_a_value_that_is_not_finite(command: str, world_size: int, number: int) -> None:
    def one(ranks: TorchCollectives, rng: Random) -> str:
        kind, cut, value = rng.choice(COMMANDS[command]), drawn_cut(rng), rng.choice(WRONG)
        stage = rng.choice(list(STAGES))
        steps = [batch(rng, str(step)) for step in range(3)]
        bad = drawn(rng, "bad", marked=True)
        act = keep
        if stage not in ("loss", "gradient"):
            values = list(getattr(bad, stage))
            values[rng.randrange(len(values))] = value
            bad = replace(bad, **{stage: tuple(values)})
        else:
            act = spoils(stage, value, MARKER)
        place = rng.randint(0, len(steps[1]))
        with_bad = [steps[0], [*steps[1][:place], bad, *steps[1][place:]], steps[2]]
        clean, faulty = Rank(ranks, kind, cut=cut), Rank(ranks, kind, act, NumericGuard(max_rows=1), cut)
        expected, weights, found = clean.train(steps), faulty.train(with_bad), faulty.guard.set_aside
        if stage == "gradient" and not found:
            # clipped, it has no gradient by itself, and only the micro-batch around it is at fault
            skipped = Rank(ranks, kind, cut=cut).train([steps[0], steps[2]])
            return "skipped" if equal(weights, skipped) else "wrong: neither set aside nor skipped"
        if not equal(weights, expected):
            return "wrong weights"
        return "named" if found == {"bad": STAGES[stage]} else f"wrong: {stage} is {found}"

    def work(ranks: TorchCollectives) -> Counter[str]:
        return Counter(one(ranks, Random(f"n1 {command} {seed}")) for seed in range(number))

    require(on(world_size, work), number, least={"named": 0.95})


@each_run
@cases(8, 3000)
def test_n2_a_row_whose_loss_jumps_by_a_thousand(command: str, world_size: int, number: int) -> None:
    """No step above the limit is applied; nearly all are taken without the row."""

    def one(ranks: TorchCollectives, rng: Random) -> str:
        kind, cut = rng.choice(COMMANDS[command]), drawn_cut(rng)
        rows = batch(rng, "0")
        bad = drawn(rng, "bad", marked=True)
        place = rng.randint(0, len(rows))
        clean = Rank(ranks, kind, cut=cut)
        before, usual = clean.weights(), clean.step(rows, 0).gradient_norm
        guard = NumericGuard(max_rows=1, spike_factor=10.0)
        for _ in range(16):
            guard.applied(usual)
        faulty = Rank(ranks, kind, spoils("loss", 1e3, MARKER), guard, cut)
        outcome = faulty.step([*rows[:place], bad, *rows[place:]], 0)
        if guard.set_aside:
            return "set aside" if equal(faulty.weights(), clean.weights()) else "wrong weights"
        if not outcome.applied:
            return "skipped" if torch.equal(faulty.weights(), before) else "wrong: skipped, and weights changed"
        return "no jump" if outcome.gradient_norm <= 10.0 * usual else "wrong: a jump was applied"

    def work(ranks: TorchCollectives) -> Counter[str]:
        return Counter(one(ranks, Random(f"n2 {command} {seed}")) for seed in range(number))

    require(on(world_size, work), number, least={"set aside": 0.7})


@each_run
@cases(40, 2000)
def test_n3_a_bit_that_changes_by_itself(command: str, world_size: int, number: int) -> None:
    def work(ranks: TorchCollectives) -> Counter[str]:
        found = Counter[str]()
        for kind in COMMANDS[command]:
            rng = Random(f"n3 {command} {kind}")
            rank = Rank(ranks, kind)
            tensors = {"table": rank.model.table, **rank.optimizer.state_tensors()}
            check = WeightCheck(
                tensors=tensors.items, collectives=ranks, every=1, replicated=True, remedy="rft-train resume RUN"
            )
            rank.train([batch(rng, str(step)) for step in range(2)])
            check.after(2, 1)
            check.before(2, 1)
            for _ in range(number // len(COMMANDS[command])):
                name, where, bit = rng.choice(sorted(tensors)), rng.randrange(ranks.world_size), rng.randrange(8)
                octets = tensors[name].detach().view(-1).view(torch.uint8)
                place = rng.randrange(len(octets))
                if ranks.rank == where:
                    octets[place] ^= 1 << bit
                try:
                    check.before(2, 1)
                    found[f"wrong: bit {bit} of octet {place} of {name} was not found"] += 1
                except NumericsError:
                    found["found"] += 1
                if ranks.rank == where:
                    octets[place] ^= 1 << bit
            check.before(2, 1)
        return found

    require(on(world_size, work), number // len(COMMANDS[command]) * len(COMMANDS[command]), least={"found": 1.0})


@each_run
@cases(500, 1_000_000)
def test_n4_the_division_of_a_batch(command: str, world_size: int, number: int) -> None:
    """Every sample is in one micro-batch of one rank of one step, units are whole, limits and denominators hold."""
    for seed in range(number):
        rng = Random(f"n4 {command} {world_size} {seed}")
        samples = [
            TrainingSample(f"{unit}.{part}", (1,) * rng.randint(2, 9), 1, 0.0, unit=f"{unit}" if size > 1 else "")
            for unit in range(rng.randint(1, 9))
            for size in [rng.choice([1, 1, 2])]
            for part in range(size)
        ]
        ranks, cut, size = rng.choice([world_size, 2 * world_size]), drawn_cut(rng), rng.randint(1, 6)
        steps = optimizer_batches(samples, size)
        assert [one for step in steps for one in step] == samples
        for step in steps:
            shares = [rank_micro_batches(step, rank, ranks, cut.cut) for rank in range(ranks)]
            micro_batches = [one for share in shares for one in share]
            assert sorted(one.sample_id for part in micro_batches for one in part) == sorted(
                one.sample_id for one in step
            ), seed
            counts = [count(part) for part in micro_batches]
            assert sum(one.num_units for one in counts) == count(step).num_units == len(units_of(step)) <= size, seed
            assert sum(one.num_loss_tokens for one in counts) == count(step).num_loss_tokens, seed
            lengths = unit_lengths(units_of(step))
            turns = {len(s) + num_filler_batches(lengths, rank, ranks, cut.cut) for rank, s in enumerate(shares)}
            assert len(turns) == 1, seed
            for part in micro_batches:
                if not cut.by_tokens:
                    assert len(units_of(part)) <= cut.max_sequences, seed
                if cut.max_tokens:
                    assert sum(one.num_tokens for one in part) <= cut.max_tokens, seed


@each_run
@cases(10, 1000)
def test_n5_memory_that_runs_out(command: str, world_size: int, number: int) -> None:
    """At a limit on the tokens of a micro-batch, or once at a drawn micro-batch of one rank."""

    def one(ranks: TorchCollectives, rng: Random) -> str:
        kind, cut = (
            rng.choice(COMMANDS[command]),
            MicroBatching(rng.randint(2, 5), rng.choice([0, 21]), rng.random() < 0.5),
        )
        steps = [batch(rng, str(step)) for step in range(3)]
        room, at, where = rng.randint(7, 20), rng.randint(1, 4), rng.randrange(ranks.world_size)
        once, passes = rng.random() < 0.5, Counter[str]()

        def act(tokens: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
            passes["forward"] += 1
            full = passes["forward"] == at and ranks.rank == where if once else len(tokens.token_ids_T) > room
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        clean, limited = Rank(ranks, kind, cut=cut), Rank(ranks, kind, act, cut=cut)
        expected = clean.train(steps)
        if not equal(limited.train(steps), expected):
            return "wrong weights"
        return "recovered" if limited.guard.halved else "fitted"

    def work(ranks: TorchCollectives) -> Counter[str]:
        return Counter(one(ranks, Random(f"n5 {command} {seed}")) for seed in range(number))

    require(on(world_size, work), number, least={"recovered": 0.4})
