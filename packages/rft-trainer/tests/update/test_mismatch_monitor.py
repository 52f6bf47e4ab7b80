"""The gap between engine and trainer: measured at the first update of a step, and what is too far stops the run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo
from rft_core.errors import ServiceError
from rft_core.exact_records import exact_bytes
from rft_core.keyed_random import uniforms
from rft_trainer.batches.packing import pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective


class Ranks(OneRank):
    """Collectives of one rank that knows what the others will say."""

    def __init__(self, others: list[bytes]) -> None:
        self.others = others

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *self.others]


def sample(name: str, behaviour: tuple[float, ...], prompt_length: int = 2) -> TrainingSample:
    ids = (*range(prompt_length), *(4,) * len(behaviour))
    return TrainingSample(name, ids, prompt_length, 1.0, behaviour_logprobs=behaviour, old_logprobs=behaviour)


def watched(watch: MismatchMonitor, chosen: list[TrainingSample], found: list[float]) -> None:
    """One micro-batch whose response tokens the trainer gives the log-probs `found`."""
    batch = pack(chosen)
    logprobs_T = torch.zeros(batch.token_ids_T.shape[0])
    logprobs_T[batch.loss_mask_T] = torch.tensor(found)
    watch.add(chosen, batch, logprobs_T)


def test_mean_and_largest_gap_over_all_micro_batches() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=None)
    watch.begin("step 1", "nothing changed")
    watched(watch, [sample("a", (-1.0, -2.0))], [-1.5, -2.0])
    watched(watch, [sample("b", (-1.0,)), sample("c", (-3.0,))], [-1.0, -2.75])
    watch.judge()
    assert watch.metrics == {"engine/logprob_gap": pytest.approx(0.75 / 4), "engine/logprob_gap_max": 0.5}


def test_above_the_limit_the_worst_token_is_named_with_both_numbers() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=0.2, remedy="do {:.2f}".format)
    watch.begin("step 7", "no weight changed")
    watched(watch, [sample("a", (-1.0,)), sample("b", (-1.0, -2.0, -1.0), prompt_length=3)], [-1.0, -1.0, -3.5, -1.0])
    with pytest.raises(ServiceError) as caught:
        watch.judge()
    error = caught.value.problem
    assert error.code == "engine.logprob_gap"
    assert "0.375 nats a token apart, at most 1.5; allowed: 0.2" in error.what
    assert "step 7; worst: sample b, response token 1 (id 4): trainer -3.5, engine -2" in error.where
    assert (error.state, error.do) == ("no weight changed", "do 0.38")


def test_a_gap_at_the_limit_passes_and_the_next_update_starts_anew() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=0.5)
    watch.begin("step 1", "")
    watched(watch, [sample("a", (-1.0,))], [-1.5])
    watch.judge()
    watch.begin("step 2", "")
    watched(watch, [sample("a", (-1.0,))], [-1.25])
    watch.judge()
    assert watch.metrics["engine/logprob_gap"] == 0.25


def test_ranks_share_one_verdict_and_one_without_samples_takes_part() -> None:
    far = exact_bytes({"sum": 9.0, "count": 3, "max": 8.0, "where": {
        "sample": "z", "token": 1, "position": 5, "trainer": -9.0, "engine": -1.0}})  # fmt: skip
    watch = MismatchMonitor(collectives=Ranks([far]), limit=1.0)
    watch.begin("step 1", "")
    with pytest.raises(ServiceError, match="3 nats a token apart, at most 8") as caught:
        watch.judge()
    assert caught.value.problem.code == "engine.logprob_gap"
    assert "sample z, response token 5" in caught.value.problem.where
    silent = MismatchMonitor(collectives=OneRank(), limit=1.0)
    silent.begin("step 1", "")
    silent.judge()
    assert silent.metrics == {}


def test_first_tokens_drawn_at_a_temperature_of_their_own_are_left_out() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=None, skips_first_token=True)
    watch.begin("step 1", "")
    watched(watch, [sample("a", (-1.0, -2.0)), sample("b", (-1.0, -2.0))], [-9.0, -2.5, -9.0, -2.25])
    watch.judge()
    assert watch.metrics == {"engine/logprob_gap": 0.375, "engine/logprob_gap_max": 0.5}


@pytest.mark.parametrize("cut", [MicroBatching(100, 0, False), MicroBatching(1, 0, False), MicroBatching(2, 25, True)])
def test_the_gap_does_not_depend_on_the_cut_and_a_refused_step_changes_nothing(cut: MicroBatching) -> None:
    made = [sample(f"s{i}", tuple((-3.0 * uniforms([i], 1 + i % 5)[0]).tolist()), 2 + i % 3) for i in range(9)]
    expected = [abs(value + torch.tensor(6.0).log().item()) for one in made for value in one.behaviour_logprobs]
    policy = BigramPolicy(6)
    updater = Updater(
        PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))),
        PlainOptimizer([policy.table]),
        OneRank(),
        micro_batching=cut,
        learning_rate=lambda update: 1.0,
    )
    watch = MismatchMonitor(collectives=OneRank(), limit=0.0)
    watch.begin("step 1", "")
    before: Tensor = policy.table.detach().clone()
    with pytest.raises(ServiceError) as caught:
        updater(made, 0, MetricTotals(), monitor=watch)
    assert caught.value.problem.code == "engine.logprob_gap"
    assert torch.equal(policy.table, before)
    watch = MismatchMonitor(collectives=OneRank(), limit=None)
    watch.begin("step 1", "")
    updater(made, 0, MetricTotals(), monitor=watch)
    assert not torch.equal(policy.table, before)
    assert watch.metrics["engine/logprob_gap"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)
    assert watch.metrics["engine/logprob_gap_max"] == pytest.approx(max(expected), abs=1e-6)


def place_of(error: ServiceError) -> str:
    return error.problem.where.rpartition("worst: ")[2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_worst_of_several_micro_batches_is_named(number: int) -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=0.0)
    watch.begin("step 1", "")
    for index in range(3):
        gap = 2.0 if index == number else 0.5
        watched(watch, [sample("x", (-1.0,)), sample(f"s{index}", (-1.0, -1.0))], [-1.25, -1.0, -1.0 - gap])
    with pytest.raises(ServiceError) as caught:
        watch.judge()
    assert place_of(caught.value) == f"sample s{number}, response token 1 (id 4): trainer -3, engine -1"
    assert watch.metrics == {}, "a step that is refused has no metrics"


def share_of(total: float, count: int, largest: float) -> bytes:
    where = {"sample": "far", "token": 9, "position": 3, "trainer": -largest, "engine": 0.0}
    return exact_bytes({"sum": total, "count": count, "max": largest, "where": where})


@pytest.mark.parametrize(("largest", "name"), [(0.25, "near"), (4.0, "far")])
def test_the_worst_of_all_ranks_is_named_and_every_token_counts_once(largest: float, name: str) -> None:
    near = sample("near", (-1.0, -1.0, -1.0))

    def judged(limit: float | None) -> MismatchMonitor:
        watch = MismatchMonitor(collectives=Ranks([share_of(1.0, 2, largest)]), limit=limit)
        watch.begin("step 1", "")
        watched(watch, [near], [-1.5, -1.0, -2.0])
        watch.judge()
        return watch

    with pytest.raises(ServiceError) as caught:
        judged(0.4)
    assert place_of(caught.value).startswith(f"sample {name}")
    # 0.5 + 0 + 1 here and 1 there, over three and two tokens
    assert judged(0.5).metrics == {"engine/logprob_gap": 0.5, "engine/logprob_gap_max": max(largest, 1.0)}
    assert judged(None).metrics["engine/logprob_gap"] == 0.5


def test_a_rank_without_tokens_names_no_worst_token_where_another_has_no_gap() -> None:
    watch = MismatchMonitor(collectives=Ranks([share_of(0.0, 2, 0.0)]), limit=None)
    watch.begin("step 1", "")
    watch.judge()
    assert watch.metrics == {"engine/logprob_gap": 0.0, "engine/logprob_gap_max": 0.0}


def test_samples_without_log_probs_of_an_engine_are_not_measured() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=0.0)
    watch.begin("step 1", "")
    chosen = [TrainingSample("s", (1, 2, 3), 1, 1.0)]
    batch = pack(chosen)
    watch.add(chosen, batch, torch.full((3,), -5.0))
    watch.judge()
    assert watch.metrics == {}


def test_a_new_update_forgets_the_last_one_before_it_is_judged() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=None)
    watch.begin("step 1", "")
    watched(watch, [sample("a", (-1.0,))], [-2.0])
    watch.judge()
    assert watch.metrics
    watch.begin("step 2", "")
    assert watch.metrics == {}
    watch.judge()
    assert watch.metrics == {}


def test_the_gap_holds_no_graph_and_is_summed_in_float64() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=None)
    watch.begin("step 1", "")
    for value in (2.0**24, 1.0, 1.0):
        chosen = [sample("a", (0.0,))]
        batch = pack(chosen)
        watch.add(chosen, batch, torch.full((3,), -value, requires_grad=True))
    kept = watch._sums  # pyright: ignore[reportPrivateUsage]
    assert not any(one.requires_grad for one in kept), "a graph a micro-batch would stay in memory"
    watch.judge()
    assert watch.metrics["engine/logprob_gap"] == (2.0**24 + 2) / 3


def test_the_remedy_is_a_limit_that_would_have_passed_unless_said() -> None:
    watch = MismatchMonitor(collectives=OneRank(), limit=0.1)
    watch.begin("step 1", "")
    watched(watch, [sample("a", (-1.0,))], [-1.5])
    with pytest.raises(ServiceError) as caught:
        watch.judge()
    assert caught.value.problem.do == "--max_logprob_gap 0.5"
