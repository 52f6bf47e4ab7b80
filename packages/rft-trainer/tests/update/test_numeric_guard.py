"""Refused steps: rows set aside within a budget, repetition, the end of the budget; the result is that without them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_algos.algorithms.published import Grpo
from rft_core.errors import NumericsError
from rft_trainer.batches.packing import count, pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer, TokenCritic
from rft_trainer.update.critic import ValueLoss, ValueObjective
from rft_trainer.update.fault_trace import FaultTracer
from rft_trainer.update.numeric_guard import Diagnosis, NumericGuard, RowFault, RowsBeyondBudgetError
from rft_trainer.update.optimizer_step import MicroBatchLoss, MicroBatchOutput, UpdateOutcome, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

RECORD = Grpo(kl_place="none", kl_coef=0.0)
WRONG = (math.nan, math.inf, -math.inf)


def sample(name: str, *response: int, **fields: Any) -> TrainingSample:
    uniform = (-1.8,) * len(response)
    usual = {"old_logprobs": uniform, "old_values": (0.5,) * len(response), "returns": (1.0,) * len(response)}
    return TrainingSample(name, (1, *response), 1, 1.0, **{**usual, **fields})


GOOD = [sample("a", 2, 3), sample("b", 4, 2, 5), sample("c", 3), sample("d", 5, 4)]


@dataclass
class Faulty:
    """A loss that is multiplied with a wrong number wherever a row is in the micro-batch, `times` times."""

    inner: MicroBatchLoss
    value: float
    length: int
    """Rows of so many tokens are at fault."""
    stage: str = "loss"
    times: int = 10**6
    prepass: bool = False
    model: object = None

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None: ...

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        output = self.inner(batch, counts, totals)
        if self.length not in torch.bincount(batch.segment_ids_T).tolist() or not self.times:
            return output
        self.times -= 1
        if self.stage == "loss":
            return replace(output, loss=output.loss * self.value)
        wrong = self.value

        def spoil(gradient: Tensor) -> Tensor:
            return gradient * wrong

        output.loss.register_hook(spoil)
        return output

    def filler(self, batch: TokenBatch) -> Tensor:
        return self.inner.filler(batch)

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        self.inner.whole_step(samples, counts, totals)


@dataclass
class Run:
    """A model with its updater, in which rows of five tokens are at fault."""

    kind: str = "policy"
    value: float = math.nan
    stage: str = "loss"
    times: int = 10**6
    guard: NumericGuard = field(default_factory=lambda: NumericGuard(max_rows=2))
    cut: MicroBatching = field(default_factory=lambda: MicroBatching(2, 0, False))

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model: nn.Module
        if self.kind == "policy":
            policy = BigramPolicy(6, dtype=torch.float64)
            self.model, self.table = policy, policy.table
            loss: Any = PolicyLoss(policy, PolicyObjective(RECORD))
        else:
            critic = TokenCritic(6, dtype=torch.float64)
            self.model, self.table = critic, critic.table
            loss = ValueLoss(critic, ValueObjective(None))
        with torch.no_grad():
            self.table.copy_(torch.randn(self.table.shape, dtype=torch.float64))
        self.update = Updater(
            Faulty(loss, self.value, 5, self.stage, self.times),
            PlainOptimizer([self.table]),
            OneRank(),
            micro_batching=self.cut,
            learning_rate=lambda update: 0.5,
            guard=self.guard,
            trace=FaultTracer(self.model),
        )

    def step(self, samples: Sequence[TrainingSample]) -> tuple[UpdateOutcome, dict[str, float]]:
        totals = MetricTotals()
        outcome = self.update(samples, 0, totals)
        return outcome, totals.merged(OneRank())


BAD = sample("bad", 2, 2, 2, 2)


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("stage", ["loss", "gradient"])
@pytest.mark.parametrize("place", range(5))
def test_a_row_at_fault_is_set_aside_and_the_step_is_that_of_the_others(
    kind: str, value: float, stage: str, place: int
) -> None:
    clean, faulty = Run(kind), Run(kind, value, stage)
    expected = clean.step(GOOD)
    outcome, metrics = faulty.step([*GOOD[:place], BAD, *GOOD[place:]])
    # the cut differs by the row that is out, and with it the order of a sum
    torch.testing.assert_close(faulty.table, clean.table, rtol=1e-12, atol=1e-14)
    assert outcome.applied
    assert outcome.gradient_norm == pytest.approx(expected[0].gradient_norm, rel=1e-12)
    assert metrics == pytest.approx(expected[1], rel=1e-12)
    assert list(faulty.guard.set_aside) == ["bad"]
    assert faulty.guard.metrics == {"policy/rows_set_aside": 1.0}


@pytest.mark.parametrize("field_name", ["old_logprobs", "token_advantages"])
@pytest.mark.parametrize("value", WRONG)
def test_an_input_that_is_not_finite_is_named_and_its_row_set_aside(field_name: str, value: float) -> None:
    clean, run = Run(), Run(times=0)
    bad = sample("bad", 2, 2, 2, 2, **{field_name: (1.0, value, 1.0, 1.0)})
    rest = [replace(one, token_advantages=(1.0,) * (one.num_tokens - 1)) for one in GOOD]
    clean.step(rest)
    assert run.step([*rest, bad])[0].applied
    torch.testing.assert_close(run.table, clean.table, rtol=1e-12, atol=1e-14)
    named = {"old_logprobs": "old_logprobs", "token_advantages": "advantages"}[field_name]
    assert run.guard.set_aside == {"bad": f"input {named}"}


def test_a_fault_that_does_not_come_again_is_repeated_once_and_costs_no_row() -> None:
    run, other = (Run(times=times, cut=MicroBatching(9, 0, False)) for times in (1, 0))
    other.step([*GOOD, BAD])
    assert run.step([*GOOD, BAD])[0].applied
    assert torch.equal(run.table, other.table)
    assert run.guard.metrics == {"policy/updates_repeated": 1.0}


def test_without_a_budget_a_step_is_skipped_whole() -> None:
    run = Run(guard=NumericGuard())
    before = run.table.detach().clone()
    outcome, _ = run.step([*GOOD, BAD])
    assert not outcome.applied
    assert torch.equal(run.table, before)
    assert run.guard.metrics == {}


def test_more_rows_than_the_budget_end_the_run_and_name_them() -> None:
    run = Run(guard=NumericGuard(max_rows=1, resume_command="resume"))
    before = run.table.detach().clone()
    with pytest.raises(RowsBeyondBudgetError) as caught:
        run.step([BAD, *GOOD, replace(BAD, sample_id="worse")])
    assert caught.value.part == "policy"
    assert [fault.sample_ids for fault in caught.value.faults] == [("bad",), ("worse",)]
    problem = caught.value.problem
    assert problem.code == "numerics.rows"
    assert "bad" in problem.where
    assert "worse" in problem.where
    assert problem.do == "look first at these rows, then: resume --max_rows_set_aside 4"
    assert problem.why.endswith("what was wrong first in 2 of the 2 rows that are known here: loss")
    assert torch.equal(run.table, before)


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("input old_logprobs", "input old_logprobs"),
        ("gradient of norm 31, above 8", "a gradient of a norm above the bound"),
        ("output of layers.0.mlp", "output of layers.0.mlp"),
    ],
)
def test_too_many_rows_are_to_be_looked_at_and_what_they_have_in_common_is_told(stage: str, told: str) -> None:
    guard = NumericGuard(
        max_rows=1,
        spike_factor=8.0,
        resume_command="resume",
        record_file="run/numerics.jsonl",
    )
    faults = (RowFault(("a",), stage, 0), RowFault(("b",), stage, 1), RowFault(("c",), "gradient of the weights", 0))
    with pytest.raises(RowsBeyondBudgetError) as caught:
        guard.refuse_scores(faults, where="step 2")
    problem = caught.value.problem
    assert problem.do == "look first at the rows that run/numerics.jsonl names, then: resume --max_rows_set_aside 6"
    assert problem.why.endswith(f"in 2 of the 3 rows that are known here: {told}")


def test_where_most_rows_are_at_fault_none_is_blamed() -> None:
    run = Run(guard=NumericGuard(max_rows=100))
    before = run.table.detach().clone()
    many = [replace(BAD, sample_id=f"bad{number}") for number in range(5)]
    outcome, _ = run.step([*GOOD, *many])
    assert not outcome.applied
    assert torch.equal(run.table, before)
    assert run.guard.set_aside == {}
    assert run.step([*GOOD, *many[:4]])[0].applied


def test_weights_that_are_not_finite_end_the_run_and_no_row_is_blamed() -> None:
    run = Run(times=0)
    with torch.no_grad():
        run.table[2, 3] = math.nan
    with pytest.raises(NumericsError) as caught:
        run.step(GOOD)
    assert caught.value.problem.code == "numerics.model_weights"
    assert "table" in caught.value.problem.what
    assert run.guard.num_rows == 0


def test_rows_of_a_unit_are_set_aside_together() -> None:
    run, clean = Run(), Run()
    pair = [replace(BAD, unit="pair"), replace(sample("beside", 3), unit="pair")]
    clean.step(GOOD)
    run.step([*GOOD[:2], *pair, *GOOD[2:]])
    assert list(run.guard.set_aside) == ["bad", "beside"]
    torch.testing.assert_close(run.table, clean.table, rtol=1e-12, atol=1e-14)


def test_a_row_stays_out_of_a_supervised_run_and_returns_where_samples_are_drawn_anew() -> None:
    for keeps_out in (False, True):
        guard = NumericGuard(max_rows=1, keeps_out=keeps_out)
        Run(guard=guard).step([*GOOD, BAD])
        guard.begin_step()
        assert list(guard.set_aside) == (["bad"] if keeps_out else [])
        samples = [*GOOD, BAD]
        left, counts = guard.without_set_aside(samples, count(samples))
        assert [one.sample_id for one in left] == ["a", "b", "c", "d", *([] if keeps_out else ["bad"])]
        assert counts == count(left)


def test_samples_left_out_for_their_advantage_stay_in_the_denominators() -> None:
    guard = NumericGuard(max_rows=1, set_aside={"bad": "loss"})
    left, counts = guard.without_set_aside([*GOOD, BAD], Counts(100, 20, 20))
    assert left == GOOD
    assert counts == Counts(96, 19, 19)


def test_the_weight_of_a_row_that_is_set_aside_leaves_the_denominator() -> None:
    guard = NumericGuard(max_rows=1, set_aside={"bad": "loss"})
    samples = [replace(GOOD[0], weight=3.0), *GOOD[1:], replace(BAD, weight=0.25)]
    left, counts = guard.without_set_aside(samples, count(samples))
    assert left == samples[:-1]
    assert counts == count(left)
    unweighted = [samples[0], *GOOD[1:], BAD]
    assert guard.without_set_aside(unweighted, count(unweighted))[1] == count(unweighted[:-1])


def test_rows_left_out_since_a_rollback_cost_no_budget_and_stay_out() -> None:
    run, clean = Run(guard=NumericGuard(max_rows=1, left_out={"bad": "loss"})), Run()
    clean.step(GOOD)
    assert run.step([*GOOD, BAD])[0].applied
    torch.testing.assert_close(run.table, clean.table, rtol=1e-12, atol=1e-14)
    run.guard.begin_step()
    assert run.guard.metrics == {"policy/rows_left_out": 1.0}
    again = NumericGuard(max_rows=1)
    again.load_state(run.guard.state())
    assert again == run.guard
    assert "left_out" not in NumericGuard().state()


def test_a_score_of_a_row_that_is_left_out_is_known_and_another_one_counts() -> None:
    guard = NumericGuard(max_rows=1, left_out={"x": "loss"})
    known, new = RowFault(("x",), "values", 0), RowFault(("y",), "values", 0)
    assert guard.refuse_scores([known], where="step 1")
    assert guard.set_aside == {}
    assert guard.refuse_scores([known, new], where="step 1")
    assert guard.set_aside == {"y": "values"}
    with pytest.raises(RowsBeyondBudgetError) as caught:
        guard.refuse_scores([known, RowFault(("z",), "values", 0)], where="step 2")
    assert [fault.sample_ids for fault in caught.value.faults] == [("z",)]


def counted(guard: NumericGuard) -> dict[str, float | str]:
    """The metrics without the names of rows."""
    return {name: value for name, value in guard.metrics.items() if not name.endswith("largest_rows")}


def spiky(norms: Sequence[float], factor: float) -> NumericGuard:
    guard = NumericGuard(max_rows=3, spike_factor=factor)
    for norm in norms:
        guard.applied(norm)
    return guard


def test_a_norm_is_a_spike_against_the_median_of_the_last_steps() -> None:
    assert spiky([1.0] * 15, 10.0).largest_norm() == math.inf, "too few norms to compare with"
    assert spiky([1.0] * 8 + [3.0] * 9, 10.0).largest_norm() == 30.0
    assert spiky([1.0] * 80, 0.0).largest_norm() == math.inf
    assert spiky([9.0] * 64 + [1.0] * 64, 2.0).largest_norm() == 2.0, "the last 64"


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_row_that_makes_the_gradient_jump_is_set_aside(kind: str) -> None:
    clean, run = Run(kind), Run(kind, 1e3, guard=spiky([1.0] * 20, 20.0))
    clean.step(GOOD)
    assert run.step([*GOOD, BAD])[0].applied
    torch.testing.assert_close(run.table, clean.table, rtol=1e-12, atol=1e-14)
    assert counted(run.guard) == {"policy/rows_set_aside": 1.0, "policy/spikes": 1.0}
    assert "gradient of norm" in run.guard.set_aside["bad"]


def test_a_jump_that_no_row_causes_alone_skips_the_step() -> None:
    run = Run(times=0, guard=spiky([0.001] * 20, 1.5))
    before = run.table.detach().clone()
    many = [replace(one, sample_id=f"{one.sample_id}{number}") for number in range(4) for one in GOOD]
    largest = max(float(fault or 0.0) for fault in own_norms(run, many))
    run.guard = spiky([largest] * 20, 1.01)
    run.update._guard = run.guard  # pyright: ignore[reportPrivateUsage]
    outcome, _ = run.step(many)
    assert outcome.gradient_norm > run.guard.largest_norm()
    assert not outcome.applied
    assert torch.equal(run.table, before)
    assert counted(run.guard) == {"policy/spikes": 1.0}


class SummedOptimizer(PlainOptimizer):
    """Gradients arrive summed over the ranks, as those of DeepSpeed and FSDP."""

    def own_norm(self) -> float | None:
        return None


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_row_that_makes_a_sum_over_ranks_jump_is_set_aside(kind: str) -> None:
    clean, run = Run(kind), Run(kind, 1e3, guard=spiky([1.0] * 20, 20.0))
    run.update._optimizer = SummedOptimizer([run.table])  # pyright: ignore[reportPrivateUsage]
    clean.step(GOOD)
    assert run.step([*GOOD, BAD])[0].applied
    torch.testing.assert_close(run.table, clean.table, rtol=1e-12, atol=1e-14)
    assert set(run.guard.set_aside) == {"bad"}
    assert "gradient of norm" in run.guard.set_aside["bad"]


def test_a_hundred_rows_that_make_the_gradient_jump_are_all_found_and_none_is_applied() -> None:
    run, rows = Run(value=1e3, guard=spiky([1.0] * 20, 20.0)), list[Mapping[str, Any]]()
    run.guard.record, run.guard.max_rows = rows.append, 100
    run.update._learning_rate = lambda update: 1e-9  # pyright: ignore[reportPrivateUsage]  # the same model throughout
    before = run.table.detach().clone()
    for number in range(100):
        run.guard.begin_step()
        others = [replace(one, sample_id=f"{one.sample_id}{number}") for one in GOOD[: 2 + number % 3]]
        where = number % (len(others) + 1)
        bad = replace(BAD, sample_id=f"bad{number}")
        assert run.step([*others[:where], bad, *others[where:]])[0].applied
        assert list(run.guard.set_aside) == [f"bad{number}"]
    assert run.guard.metrics["policy/spikes"] == 100
    assert len(rows) == 100
    torch.testing.assert_close(run.table, before, rtol=0, atol=1e-6)


def test_the_rows_with_the_largest_gradients_are_told_where_none_is_at_fault_alone() -> None:
    run, rows = Run(times=0, guard=spiky([0.001] * 20, 1.5)), list[Mapping[str, Any]]()
    norms = own_norms(run, GOOD)
    assert all(norms)
    run.guard = spiky([max(float(norm or 0.0) for norm in norms)] * 20, 1.0)
    run.guard.record = rows.append
    run.update._guard = run.guard  # pyright: ignore[reportPrivateUsage]
    assert not run.step(GOOD)[0].applied
    told = [(one["samples"], one["norm"]) for one in rows[0]["largest"]]
    expected = sorted(zip(norms, [[one.sample_id] for one in GOOD], strict=True), reverse=True)[:3]
    assert [(names, pytest.approx(norm)) for norm, names in expected] == told
    first = expected[0][1][0]
    assert str(run.guard.metrics["policy/largest_rows"]).startswith(f"{first} (norm ")
    run.guard.begin_step()
    assert "policy/largest_rows" not in run.guard.metrics


@pytest.mark.parametrize("summed", [False, True])
def test_without_a_limit_the_rows_of_a_jump_are_told_and_the_steps_are_those_of_a_run_that_does_not_look(
    summed: bool,
) -> None:
    rows: list[Mapping[str, Any]] = []
    looks = Run(value=1e4, guard=spiky([1.0] * 20, 0.0))
    blind = Run(value=1e4, guard=NumericGuard())
    looks.guard.record = rows.append
    if summed:
        looks.update._optimizer = SummedOptimizer([looks.table])  # pyright: ignore[reportPrivateUsage]
    for run in (looks, blind):  # steps of the size that clipping leaves
        run.update._learning_rate = lambda update: 1e-6  # pyright: ignore[reportPrivateUsage]
    torch.manual_seed(0)
    outcome, _ = looks.step([*GOOD, BAD])
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert blind.step([*GOOD, BAD])[0] == outcome
    assert outcome.applied
    assert torch.equal(looks.table, blind.table)
    assert torch.equal(torch.rand(1), drawn), "what is drawn afterwards stays the same"
    assert looks.guard.set_aside == {}
    (row,) = rows
    assert "the step was applied" in str(row["what"])
    assert row["largest"][0]["samples"] == ["bad"]
    assert str(looks.guard.metrics["policy/largest_rows"]).startswith("bad (norm ")


def test_rows_are_named_in_few_steps_of_a_run() -> None:
    guard = spiky([1.0] * 20, 0.0)
    assert guard.watched_norm() == 50.0
    for _ in range(8):
        guard.name_rows(Diagnosis(), 100.0, where="update 1")
    assert guard.watched_norm() == math.inf
    again = NumericGuard()
    again.load_state(guard.state())
    assert again.watched_norm() == math.inf
    assert "named" not in NumericGuard().state()


def test_steps_without_a_signal_say_nothing_of_the_size_of_a_gradient() -> None:
    assert spiky([0.0] * 40 + [1.0] * 16, 10.0).largest_norm() == 10.0
    assert spiky([0.0] * 40, 10.0).largest_norm() == math.inf


def own_norms(run: Run, samples: Sequence[TrainingSample]) -> list[float | None]:
    """The norm of each sample's own gradient under the denominators of all."""
    norms: list[float | None] = []
    for one in samples:
        optimizer = PlainOptimizer([run.table])
        loss = run.update._loss  # pyright: ignore[reportPrivateUsage]
        optimizer.backward(loss(pack([one]), count(samples), MetricTotals()).loss)
        norms.append(optimizer.own_norm())
        optimizer.discard()
    return norms


def test_what_a_guard_remembers_is_plain_json_and_comes_back() -> None:
    guard = spiky([1.0, 2.0], 4.0)
    guard.keeps_out, guard.set_aside, guard.num_rows = True, {"x": "loss"}, 3
    guard.repeated, guard.spikes, guard.halved = 1, 2, 1
    assert guard.metrics == {
        "policy/rows_set_aside": 3.0,
        "policy/updates_repeated": 1.0,
        "policy/spikes": 2.0,
        "policy/micro_batch_halvings": 1.0,
    }
    again = NumericGuard(max_rows=3, spike_factor=4.0, keeps_out=True)
    again.load_state(guard.state())
    assert again == guard
    guard.keeps_out = False
    assert guard.state()["set_aside"] == {}, "of a step that a resume takes again"


def test_what_happened_is_recorded_with_its_rows_and_stages() -> None:
    rows: list[Any] = []
    guard = NumericGuard(part="critic", max_rows=2, record=rows.append)
    fault = RowFault(("a", "b"), "output of head", 1, -2.0, 3.5)
    assert guard.decide(Diagnosis((fault,)), math.nan, num_units=9, attempt=0, where="update 7")
    assert str(fault) == "a + b: output of head (rank 1, from inputs between -2 and 3.5)"
    assert rows == [
        {
            "where": "update 7",
            "part": "critic",
            "what": "loss or gradient is not finite; 2 rows are set aside, the step is taken without them",
            "norm": "nan",
            "faults": [{"samples": ["a", "b"], "stage": "output of head", "rank": 1}],
        }
    ]
    assert guard.metrics == {"critic/rows_set_aside": 2.0}
