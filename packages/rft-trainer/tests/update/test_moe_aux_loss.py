"""The routers' loss beside the objective: the same step however it is cut, counted once before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_algos.algorithms.published import Grpo
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.packing import pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer
from rft_trainer.update.moe_aux_loss import MoeAuxLoss, RouterWeights, falling_rate
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

EXPERTS = 3
BALANCE = RouterWeights(0.1)


class Share:
    """A micro-batch's part of the loss, and its rows [R, E] of logits in one layer."""

    def __init__(self, share: Tensor, max_load: Tensor, rows: Tensor, loads_E: Tensor) -> None:
        self.share, self.max_load = share, max_load
        self.log_normaliser_LR = rows.logsumexp(-1)[None]
        self.loads_LE = loads_E[None]
        self.max_logit = rows.detach().abs().max() if rows.numel() else torch.zeros(())


class RoutedBigrams(BigramPolicy):
    """The row that predicts a token goes to the expert that is highest in its row of a trainable table."""

    num_experts = EXPERTS
    num_routers = 1

    def __init__(self, vocab_size: int, *, biased: bool = False) -> None:
        super().__init__(vocab_size, dtype=torch.float64)
        self.router_biases = [torch.zeros(EXPERTS)] if biased else []
        generator = torch.Generator().manual_seed(3)
        self.routes = nn.Parameter(torch.randn(vocab_size, EXPERTS, generator=generator, dtype=torch.float64))
        self.counted = 0
        self.watched: list[Share] | None = None

    def _rows(self, tokens: PackedTokens) -> Tensor:
        return self.routes[tokens.token_ids_T.roll(1)[tokens.target_mask_T]]

    def expert_counts(self, tokens: PackedTokens) -> Tensor:
        self.counted += 1
        return torch.bincount(self._rows(tokens).argmax(-1), minlength=EXPERTS).double()

    @contextmanager
    def watching_routers(self) -> Iterator[list[Share]]:
        self.watched = kept = list[Share]()
        yield kept
        self.watched = None

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        if self.watched is not None:
            rows = self._rows(tokens).detach()
            loads_E = torch.bincount(self._chosen(rows), minlength=EXPERTS).double()
            self.watched.append(Share(torch.zeros(()), torch.zeros(()), rows, loads_E))
        return super().token_logprobs(tokens, **options)

    def token_logprobs_and_balance(
        self, tokens: PackedTokens, *, expert_counts_E: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None, Share]:
        rows = self._rows(tokens)
        loads_E = torch.bincount(self._chosen(rows), minlength=EXPERTS).double()
        expert_counts_E = loads_E if expert_counts_E is None else expert_counts_E
        total = expert_counts_E.sum()
        share = EXPERTS * (rows.softmax(-1).sum(0) * expert_counts_E).sum() / total**2
        return *self.token_logprobs(tokens, **options), Share(
            share, EXPERTS * expert_counts_E.max() / total, rows, loads_E
        )

    def _chosen(self, rows: Tensor) -> Tensor:
        return (rows + self.router_biases[0] if self.router_biases else rows).argmax(-1)


class RanksOf:
    """One rank of several whose sums are known beforehand, in the shape that is asked for."""

    def __init__(self, rank: int, world_size: int, summed: Tensor) -> None:
        self.rank, self.world_size, self._summed = rank, world_size, summed

    max = OneRank.max
    gather_bytes = OneRank.gather_bytes

    def sum(self, tensor: Tensor) -> Tensor:
        return self._summed.reshape(tensor.shape)


class KeepGradients(PlainOptimizer):
    """Does not step."""

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> Any:
        return type("Outcome", (), {"gradient_norm": 0.0, "applied": True, "loss_scale": None})()


def samples() -> list[TrainingSample]:
    made = []
    for index in range(7):
        tokens = tuple((3 * index + place * place) % 6 for place in range(4 + index % 4))
        old = (-1.0,) * (len(tokens) - 2)
        made.append(
            TrainingSample(f"s{index}", tokens, 2, float(index % 3 - 1), behaviour_logprobs=old, old_logprobs=old)
        )
    return made


def one_step(
    cut: MicroBatching, *, weights: RouterWeights = BALANCE, world_size: int = 1
) -> tuple[Tensor, Tensor, Any, int]:
    """(gradient of the routes, of the logits, merged metrics of rank 0, forwards that counted)."""
    whole = pack(samples())
    counts_E = RoutedBigrams(6).expert_counts(whole.tokens)
    routes, logits, counted = torch.zeros(6, EXPERTS).double(), torch.zeros(6, 6).double(), 0
    merged = []
    for rank in range(world_size):
        policy = RoutedBigrams(6)
        ranks: Any = OneRank() if world_size == 1 else RanksOf(rank, world_size, counts_E)
        updater = Updater(
            PolicyLoss(
                policy,
                PolicyObjective(Grpo(kl_place="none", kl_coef=0.0)),
                balanced=MoeAuxLoss(policy, weights, collectives=ranks),
            ),
            KeepGradients([policy.table, policy.routes]),
            ranks,
            micro_batching=cut,
            learning_rate=lambda update: 0.1,
        )
        totals = MetricTotals()
        updater(samples(), 0, totals)
        routes += policy.routes.grad if policy.routes.grad is not None else 0.0
        logits += policy.table.grad if policy.table.grad is not None else 0.0
        counted += policy.counted
        merged.append(totals.merged(OneRank()))
    return routes, logits, merged[0], counted


WHOLE = MicroBatching(100, 0, False)


def test_the_step_does_not_depend_on_the_cut_or_the_number_of_ranks() -> None:
    routes, logits, metrics, counted = one_step(WHOLE)
    assert routes.abs().max() > 1e-3
    assert counted == 0, "one micro-batch on one rank counts itself"
    for cut in (MicroBatching(1, 0, False), MicroBatching(3, 0, False), MicroBatching(2, 11, True)):
        other, other_logits, other_metrics, counted = one_step(cut)
        torch.testing.assert_close(other, routes, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(other_logits, logits, rtol=1e-10, atol=1e-14)
        assert other_metrics == pytest.approx(metrics, rel=1e-10)
        assert counted > 1
    for world_size in (2, 20):
        other, other_logits, _, _ = one_step(MicroBatching(2, 0, False), world_size=world_size)
        torch.testing.assert_close(other, routes, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(other_logits, logits, rtol=1e-10, atol=1e-14)


def test_the_coefficient_weighs_the_gradient_and_not_the_metric() -> None:
    once, logits, metrics, _ = one_step(WHOLE, weights=RouterWeights(0.1))
    thrice, same, others, _ = one_step(WHOLE, weights=RouterWeights(0.3))
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(same, logits)
    assert metrics == pytest.approx(others, rel=1e-12)
    assert 1.0 <= metrics["router/max_load"] <= EXPERTS
    assert metrics["router/balance"] > 0


def test_the_metric_is_the_loss_of_the_step_by_hand() -> None:
    whole = pack(samples())
    rows = RoutedBigrams(6).routes.detach()[whole.token_ids_T.roll(1)[whole.loss_mask_T]]
    frequency = torch.bincount(rows.argmax(-1), minlength=EXPERTS).double() / len(rows)
    expected = EXPERTS * float((frequency * rows.softmax(-1).mean(0)).sum())
    assert one_step(MicroBatching(2, 0, False))[2]["router/balance"] == pytest.approx(expected, rel=1e-10)


def test_a_rank_without_micro_batches_takes_part_in_the_count() -> None:
    asked: list[Tensor] = []

    class Noting(RanksOf):
        def sum(self, tensor: Tensor) -> Tensor:
            asked.append(tensor)
            return super().sum(tensor)

    ranks: Any = Noting(1, 2, torch.ones(EXPERTS))
    MoeAuxLoss(RoutedBigrams(6), RouterWeights(1.0), collectives=ranks).begin([])
    assert [counts.tolist() for counts in asked] == [[0.0] * EXPERTS]


def test_fillers_are_computed_and_not_counted() -> None:
    policy = RoutedBigrams(6)
    asked: list[Tensor] = []

    class Noting(OneRank):
        world_size = 2

        def sum(self, tensor: Tensor) -> Tensor:
            asked.append(tensor.clone())
            return tensor

    own, idle = pack(samples()[:2]), pack(samples()[2:3])
    alone = RoutedBigrams(6).expert_counts(own.tokens)
    MoeAuxLoss(policy, RouterWeights(1.0), collectives=Noting()).begin([own], [idle, idle])
    assert policy.counted == 3
    assert [counts.tolist() for counts in asked] == [alone.tolist()]
    assert asked[0].dtype == torch.float64


def test_each_step_counts_anew() -> None:
    policy = RoutedBigrams(6)
    balanced = MoeAuxLoss(policy, RouterWeights(1.0), collectives=OneRank())
    halves = [pack(samples()[:3]), pack(samples()[3:])]
    balanced.begin(halves)
    balanced.begin(halves[:1])
    assert policy.counted == 2, "one micro-batch on one rank counts itself"
    totals = MetricTotals()
    balanced.token_logprobs(halves[0].tokens)
    term = balanced.term(halves[0], Counts(int(halves[0].loss_mask_T.sum()), 3), totals)
    alone = RoutedBigrams(6).token_logprobs_and_balance(halves[0].tokens, expert_counts_E=None)[2]
    torch.testing.assert_close(term, alone.share)
    merged = totals.merged(OneRank())
    assert merged["router/balance"] == pytest.approx(float(alone.share.detach()))
    assert merged["router/max_load"] == pytest.approx(float(alone.max_load))


def test_the_metric_counts_the_share_of_the_tokens_that_is_here() -> None:
    balanced = MoeAuxLoss(RoutedBigrams(6), RouterWeights(0.5), collectives=OneRank())
    batch = pack(samples()[:1])
    balanced.begin([batch])
    balanced.token_logprobs(batch.tokens)
    num_here = int(batch.loss_mask_T.sum())
    metrics: list[float] = []
    for num_in_all in (num_here, 4 * num_here):
        totals = MetricTotals()
        balanced.term(batch, Counts(num_in_all, 9), totals)
        metrics.append(totals.merged(OneRank())["router/balance"])
    # the total is the part of this micro-batch, which the counts of all others fill up to 1
    assert metrics[1] == pytest.approx(4 * metrics[0])


def test_a_step_without_loss_tokens_has_no_metric() -> None:
    balanced = MoeAuxLoss(RoutedBigrams(6), RouterWeights(0.5), collectives=OneRank())
    with pytest.raises(AssertionError, match="a forward comes first"):
        balanced.term(pack(samples()[:1]), Counts(1, 1), MetricTotals())
    batch = pack(samples()[:1])
    balanced.token_logprobs(batch.tokens)
    totals = MetricTotals()
    prompts = pack([TrainingSample("p", (1, 2), 2, 0.0)])
    balanced.term(prompts, Counts(0, 0), totals)
    assert "router/balance" not in totals.merged(OneRank())


def test_the_z_loss_is_the_mean_over_the_rows_of_the_step_however_it_is_cut() -> None:
    whole = pack(samples())
    rows = RoutedBigrams(6).routes.detach()[whole.token_ids_T.roll(1)[whole.loss_mask_T]]
    watched, _, _, counted = one_step(WHOLE, weights=RouterWeights())
    assert counted == 0
    assert not watched.any(), "without a weight the routers are only watched"
    routes, _, metrics, _ = one_step(WHOLE, weights=RouterWeights(z_loss=0.5))
    assert metrics["router/z_loss"] == pytest.approx(float(rows.logsumexp(-1).square().mean()))
    assert metrics["router/max_logit"] == pytest.approx(float(rows.abs().max()))
    assert "router/balance" not in metrics
    table = RoutedBigrams(6).routes
    expected = 0.5 * table[whole.token_ids_T.roll(1)[whole.loss_mask_T]].logsumexp(-1).square().mean()
    (wanted,) = torch.autograd.grad(expected, table)
    torch.testing.assert_close(routes, wanted, rtol=1e-10, atol=1e-14)
    other, _, other_metrics, counted = one_step(MicroBatching(2, 0, False), weights=RouterWeights(z_loss=0.5))
    torch.testing.assert_close(other, routes, rtol=1e-10, atol=1e-14)
    assert other_metrics == pytest.approx(metrics, rel=1e-10)
    assert counted == 0, "a sum over rows needs no forward before"


def test_loads_of_the_step_move_the_bias_once_however_it_is_cut() -> None:
    whole = pack(samples())
    loads = RoutedBigrams(6).expert_counts(whole.tokens)
    signs = torch.sign(loads.mean() - loads)
    for cut in (WHOLE, MicroBatching(2, 0, False)):
        policy = RoutedBigrams(6, biased=True)
        updater = Updater(
            PolicyLoss(
                policy,
                PolicyObjective(Grpo(kl_place="none", kl_coef=0.0)),
                balanced=MoeAuxLoss(policy, RouterWeights(bias_rate=0.25), collectives=OneRank()),
            ),
            KeepGradients([policy.table, policy.routes]),
            OneRank(),
            micro_batching=cut,
            learning_rate=lambda update: 0.1,
        )
        totals = MetricTotals()
        updater(samples(), 0, totals)
        torch.testing.assert_close(policy.router_biases[0], (0.25 * (signs - signs.mean())).float())
        merged = totals.merged(OneRank())
        assert merged["router/max_violation"] == pytest.approx(float(loads.max() / loads.mean()) - 1)
        assert merged["router/max_violation_worst"] == merged["router/max_violation_layer_0"]
        assert merged["router/dead_experts"] == int((loads < 0.05 * loads.mean()).sum())
        shares = loads / loads.sum()
        assert merged["router/entropy_layer_0"] == merged["router/entropy"]
        assert merged["router/entropy"] == pytest.approx(float(torch.special.entr(shares).sum()) / math.log(EXPERTS))


def test_routers_without_a_weight_are_watched_and_the_step_is_the_same_to_the_bit() -> None:
    cut = MicroBatching(2, 0, False)
    _, watched, metrics, counted = one_step(cut, weights=RouterWeights())
    policy = RoutedBigrams(6)
    loss = PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0)))
    optimizer = KeepGradients([policy.table])
    updater = Updater(loss, optimizer, OneRank(), micro_batching=cut, learning_rate=lambda update: 0.1)
    totals = MetricTotals()
    updater(samples(), 0, totals)
    assert policy.table.grad is not None
    assert torch.equal(watched, policy.table.grad)
    plain = totals.merged(OneRank())
    assert metrics == plain | {name: value for name, value in metrics.items() if name.startswith("router/")}
    loads = RoutedBigrams(6).expert_counts(pack(samples()).tokens)
    assert metrics["router/max_violation"] == pytest.approx(float(loads.max() / loads.mean()) - 1)
    assert "router/z_loss" in metrics
    assert counted == 0


def test_watched_routers_need_no_pass_before_the_step_and_leave_the_fused_loss_to_the_policy() -> None:
    policy: Any = RoutedBigrams(6)
    objective = PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))
    fused: list[int] = []

    class Fused:
        def prefers_fused_loss(self, num_rows: int) -> bool:
            fused.append(num_rows)
            return False

    batch = pack(samples()[:2])
    counts = Counts(int(batch.loss_mask_T.sum()), 2)
    for weights, asks in ((RouterWeights(), 1), (RouterWeights(bias_rate_end=0.1), 1), (RouterWeights(0.1), 0)):
        routers = MoeAuxLoss(policy, weights, collectives=OneRank())
        loss = PolicyLoss(policy, objective, balanced=routers, fused=Fused())  # type: ignore[arg-type]
        fused.clear()
        loss(batch, counts, MetricTotals())
        assert (loss.prepass, len(fused)) == (not asks, asks)


def test_loads_of_a_step_that_is_taken_again_count_once() -> None:
    """As where memory runs out, and as a search for rows at fault computes them with other totals."""
    policy = RoutedBigrams(6)
    routers = MoeAuxLoss(policy, RouterWeights(), collectives=OneRank())
    loss = PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0)), balanced=routers)
    totals, batch = MetricTotals(), pack(samples())
    counts = Counts(int(batch.loss_mask_T.sum()), 7)
    mark = totals.mark()
    loss(batch, counts, totals)
    totals.restore(mark)
    loss(pack(samples()[:1]), counts, MetricTotals())
    loss(batch, counts, totals)
    loads = totals.take_sum("router/loads")
    assert loads is not None
    assert loads.tolist() == [policy.expert_counts(batch.tokens).tolist()]
    assert totals.take_sum("router/loads") is None


def test_a_rank_without_rows_takes_part_in_the_loads() -> None:
    policy = RoutedBigrams(6, biased=True)
    ranks: Any = RanksOf(1, 2, torch.tensor([6.0, 0.0, 0.0]).double())
    balanced = MoeAuxLoss(policy, RouterWeights(bias_rate=0.3), collectives=ranks)
    balanced.begin([])
    totals = MetricTotals()
    balanced.after_step(totals)
    torch.testing.assert_close(policy.router_biases[0], torch.tensor([-0.4, 0.2, 0.2]))
    assert totals.merged(OneRank())["router/dead_experts"] == 2


def test_the_step_of_the_bias_falls_over_the_run_and_a_small_one_stays() -> None:
    assert [falling_rate(0.01, 0.001, passed) for passed in (0.0, 0.5, 1.0, 2.0)] == pytest.approx(
        [0.01, 0.01 / 10**0.5, 0.001, 0.001]
    )
    assert falling_rate(0.001, 0.001, 0.7) == 0.001
    assert falling_rate(0.0005, 0.001, 0.7) == 0.0005
    assert falling_rate(0.01, 0.0, 0.7) == 0.01
    policy = RoutedBigrams(6, biased=True)
    ranks: Any = RanksOf(1, 2, torch.tensor([6.0, 0.0, 0.0]).double())
    weights = RouterWeights(bias_rate=0.3, bias_rate_end=0.003)
    balanced = MoeAuxLoss(policy, weights, collectives=ranks, passed=lambda: 0.5)
    balanced.begin([])
    balanced.after_step(MetricTotals())
    torch.testing.assert_close(policy.router_biases[0], torch.tensor([-0.04, 0.02, 0.02]))


def test_a_step_without_rows_moves_nothing() -> None:
    policy = RoutedBigrams(6, biased=True)
    totals = MetricTotals()
    MoeAuxLoss(policy, RouterWeights(bias_rate=0.3), collectives=OneRank()).after_step(totals)
    assert policy.router_biases[0].tolist() == [0.0] * EXPERTS
    assert totals.merged(OneRank()) == {}


def test_routers_without_a_bias_are_refused_by_name() -> None:
    with pytest.raises(OptionsError, match=r"balance_bias_rate = 0\.1 with routers that have no bias"):
        MoeAuxLoss(RoutedBigrams(6), RouterWeights(bias_rate=0.1), collectives=OneRank())
