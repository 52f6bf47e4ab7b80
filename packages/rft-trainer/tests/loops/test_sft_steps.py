"""Supervised fine-tuning in detail: the order of what a run calls, what is measured, and when it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_core.errors import NumericsError, SavedAfterSignal
from rft_trainer.batches.packing import count, pack
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.sft import SftLoop, TokenLikelihood, mean_loss
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Counts, TrainingSample
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.testing.bigram import BigramPolicy, OneRank
from rft_trainer.update.optimizer_step import UpdateOutcome

SAMPLES = [TrainingSample(f"s:{number}", (1, 2 + number % 3, *[0] * (number % 3)), 1, 0.0) for number in range(5)]


@dataclass
class UpdaterOf:
    """An updater that hands a batch on at its step."""

    update: Callable[..., UpdateOutcome]
    batch: tuple[Any, ...] = ()

    def forward_backward(self, *batch: Any, loss: None = None) -> None:
        self.batch = batch

    def step(self) -> UpdateOutcome:
        return self.update(*self.batch)

    def see(self, metrics: object) -> None: ...


@dataclass
class Parts:
    """Stands for every collaborator of a loop: notes what is called in order, and returns what a test has set."""

    losses: list[float] = field(default_factory=list[float])
    outcomes: list[UpdateOutcome] = field(default_factory=list[UpdateOutcome])
    signal_at: str = ""
    """The event at which a signal arrives."""
    save_is_due: bool = False
    saved_step: int | None = None
    events: list[str] = field(default_factory=list[str])
    batches: list[list[str]] = field(default_factory=list[list[str]])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    signals: StopSignals = field(default_factory=StopSignals)

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self.signal_at:
            self.signals.received = "SIGTERM"

    def enter_phase(self, name: str | None) -> None:
        self.note(f"<{name}" if name else ">")

    def end_step(self) -> None: ...

    def update(
        self, samples: Sequence[TrainingSample], number: int, totals: Any, counts: Counts, monitor: None
    ) -> UpdateOutcome:
        assert counts == count(samples)
        self.note(f"update {number}")
        self.batches.append([sample.sample_id for sample in samples])
        totals.add({"policy/loss": (torch.tensor(3.0), torch.tensor(2.0))})
        return self.outcomes.pop(0) if self.outcomes else UpdateOutcome(2.0, True, 0.5, 3)

    def report(self, metrics: Mapping[str, object], progress: Progress, timer: PhaseTimer, **counts: int) -> None:
        self.note(f"report {progress.step}")
        self.rows.append({**metrics, **counts})

    def report_evaluation(self, name: str, measured: Mapping[str, object], progress: Progress, **lists: object) -> None:
        self.note(f"report {name}")
        self.evaluations.append({"name": name, "step": progress.step, **measured, **lists})

    def due(self, step: int, *, ended_episode: int | None) -> bool:
        self.note(f"due {step} {ended_episode}")
        return self.save_is_due

    def save(self, step: int, *, episode: int, must: bool = False) -> None:
        if step != self.saved_step:
            self.note(f"save {step} of {episode}")
            self.saved_step = step

    def wait(self) -> None: ...

    def words(self, step: int) -> str:
        return f"saved {step}"

    def token_logprobs(self, tokens: Any, **asked: Any) -> tuple[torch.Tensor, None]:
        """Log-probs with the next loss, or with a loss of 1 where none is left."""
        loss = self.losses.pop(0) if self.losses else 1.0
        self.note(f"loss {loss}")
        return torch.where(tokens.target_mask_T, -loss, 0.0), None


def loop_of(parts: Parts, **changed: Any) -> SftLoop:
    collaborators: dict[str, Any] = {
        "ledger": Ledger(len(SAMPLES), 2, lambda epoch: range(len(SAMPLES)), data_hash="d", seed=1),
        "samples": SAMPLES,
        "held_out": SAMPLES[:1],
        "policy": parts,
        "updater": UpdaterOf(parts.update),
        "saver": parts,
        "reporter": SimpleNamespace(step=parts.report, evaluation=parts.report_evaluation),
        "collectives": OneRank(),
        "progress": Progress(),
        "timer": PhaseTimer(clock=lambda: 0.0, listener=parts),
        "early_stop": EarlyStop(0),
        "train_batch_size": 3,
        "max_steps": 0,
        "eval_every": -1,
        "max_refused_in_a_row": 0,
        "eval_max_sequences": 4,
        "eval_max_tokens": 0,
        "resume_command": "rft-train resume here",
    }
    return SftLoop(**{**collaborators, **changed})


def kept_by(parts: Parts) -> Any:
    return SimpleNamespace(keep=lambda: parts.note("keep"), put_back=lambda: parts.note("put back"))


def test_a_run_does_everything_in_its_order_and_its_phase() -> None:
    parts = Parts()
    loop = loop_of(parts)
    loop.run(parts.signals)

    def evaluation(name: str) -> list[str]:
        return ["<eval", "loss 1.0", ">", f"report {name}"]

    def step(number: int) -> list[str]:
        return ["<data", ">", "<train", f"update {number - 1}", ">", f"report {number}"]

    assert parts.events == [
        *(*evaluation("before"), "save 0 of 0"),
        *(*step(1), "due 1 None"),
        *(*step(2), *evaluation("step 2"), "due 2 1"),  # without a number of steps, at the end of each episode
        *(*step(3), "due 3 None"),
        *(*step(4), *evaluation("after"), "due 4 2", "<save", "save 4 of 2", ">"),
    ]
    assert parts.batches == [["s:0", "s:1", "s:2"], ["s:3", "s:4"]] * 2
    assert loop.progress.updates == 4
    assert parts.rows[0] == {
        "policy/loss": 1.5,
        "policy/gradient_norm": 2.0,
        "policy/learning_rate": 0.5,
        "policy/updates": 1,
        "policy/updates_refused": 0,
        "policy/micro_batches": 3,
        "data/samples": 3,
        "num_samples": 3,
        "num_tokens": 9,
    }


def test_evaluations_and_saves_come_where_they_are_due() -> None:
    parts = Parts(save_is_due=True)
    loop_of(parts, eval_every=3, max_steps=3, train_batch_size=1).run(parts.signals)
    assert [row["name"] for row in parts.evaluations] == ["before", "after"]
    saves = [event for event in parts.events if event.startswith("save")]
    assert saves == ["save 0 of 0", "save 1 of 0", "save 2 of 0", "save 3 of 0"]
    parts = Parts()
    loop_of(parts, eval_every=2, max_steps=7, train_batch_size=1).run(parts.signals)
    assert [row["name"] for row in parts.evaluations] == ["before", "step 2", "step 4", "step 6", "after"]


def test_a_resumed_run_neither_evaluates_nor_saves_before_its_first_step() -> None:
    parts = Parts(saved_step=0)
    loop_of(parts, max_steps=1).run(parts.signals)
    assert parts.events[0] == "<data"
    assert [row["name"] for row in parts.evaluations] == ["after"]


def test_a_run_that_stops_early_evaluates_and_saves_once_more() -> None:
    parts = Parts(losses=[2.0, 3.0])
    loop_of(parts, early_stop=EarlyStop(1), eval_every=1, train_batch_size=1).run(parts.signals)
    assert [(row["name"], row["eval/loss"]) for row in parts.evaluations] == [
        ("before", 2.0),
        ("step 1", 3.0),
        ("after", 1.0),
    ]
    assert parts.events[-3:] == ["<save", "save 1 of 0", ">"]


def test_the_weights_of_the_lowest_loss_are_kept_and_put_back_before_the_last_evaluation() -> None:
    parts = Parts(losses=[2.0, 1.5, 1.75, 1.5])
    options: dict[str, Any] = {"early_stop": EarlyStop(4), "eval_every": 1, "max_steps": 3, "train_batch_size": 1}
    loop_of(parts, best=kept_by(parts), **options).run(parts.signals)
    told = [event for event in parts.events if event.startswith(("keep", "put", "report s", "report a", "report b"))]
    first = ["report before", "keep", "report step 1", "keep"]
    assert told == [*first, "report step 2", "report step 3", "put back", "report after"]
    assert parts.evaluations[-1]["eval/best_step"] == 1
    assert all("eval/best_step" not in row for row in parts.evaluations[:-1])
    assert parts.events[-3:] == ["<save", "save 3 of 0", ">"], "saved with the weights that the run ends with"


def test_the_averages_are_measured_in_the_place_of_the_weights_after_the_first_step() -> None:
    parts = Parts(losses=[2.0, 1.5, 0.5])

    @contextmanager
    def averages() -> Generator[None]:
        parts.note("averages")
        yield
        parts.note("weights")

    loop_of(parts, averages=averages, max_steps=1).run(parts.signals)
    before, after = parts.evaluations
    assert "eval_ema/loss" not in before
    assert (after["eval/loss"], after["eval_ema/loss"]) == (1.5, 0.5)
    start = parts.events.index("averages")
    assert parts.events[start - 1 : start + 3] == ["loss 1.5", "averages", "loss 0.5", "weights"]


def test_only_refused_updates_in_a_row_end_a_run() -> None:
    sound, refused = UpdateOutcome(1.0, True, 0.5, 1), UpdateOutcome(math.inf, False, 0.5, 1)
    parts = Parts(outcomes=[refused, sound, refused, refused])
    loop = loop_of(parts, max_refused_in_a_row=1, train_batch_size=5, held_out=[])
    loop.ledger = Ledger(len(SAMPLES), 9, lambda epoch: range(len(SAMPLES)), data_hash="d", seed=1)
    with pytest.raises(NumericsError) as caught:
        loop.run(parts.signals)
    assert caught.value.problem.code == "numerics.non_finite"
    assert caught.value.problem.where == "step 4, update 4; samples s:0, s:1, s:2"
    assert loop.progress.step == 3


def test_a_signal_ends_a_run_after_its_step_and_not_after_the_last() -> None:
    parts = Parts(signal_at="update 1")
    with pytest.raises(SavedAfterSignal):
        loop_of(parts, held_out=[]).run(parts.signals)
    assert (parts.saved_step, len(parts.rows)) == (2, 2)
    last = Parts(signal_at="update 3")
    loop_of(last, held_out=[]).run(last.signals)
    assert last.saved_step == 4


def test_what_the_run_gives_the_measured_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, asked = Parts(), list[Any]()

    def measured(policy: Any, samples: Any, collectives: Any, **options: Any) -> float:
        asked.append((policy, samples, collectives, options))
        return 1.0

    monkeypatch.setattr("rft_trainer.loops.sft.mean_loss", measured)
    ranks = OneRank()
    changed = {"data_ranks": ranks, "device": "meta", "collective_forward": True, "eval_max_tokens": 7}
    loop_of(parts, max_steps=1, **changed).run(parts.signals)
    options = {"max_sequences": 4, "max_tokens": 7, "device": "meta", "collective_forward": True}
    assert asked == [(parts, SAMPLES[:1], ranks, options)] * 2
    loop = loop_of(parts, max_steps=1)
    loop.run(parts.signals)
    assert asked[-1] == (
        parts,
        SAMPLES[:1],
        loop.collectives,
        {**options, "max_tokens": 0, "device": "cpu", "collective_forward": False},
    )


# early stopping


def test_patience_of_none_never_ends_a_run_and_one_ends_it_after_one() -> None:
    forever, one = EarlyStop(0), EarlyStop(1)
    assert [forever.observe(1.0, step) for step in range(5)] == [False] * 5
    assert [one.observe(1.0, step) for step in range(2)] == [False, True]
    assert (one.best, one.best_step) == (1.0, 0), "an equal loss is no better one"


def test_a_loss_at_the_target_ends_a_run_and_without_a_target_none_does() -> None:
    assert [EarlyStop(0, target=0.5).observe(loss, 1) for loss in (0.51, 0.5, 0.4)] == [False, True, True]
    assert [EarlyStop(0).observe(loss, 1) for loss in (0.05, 0.0)] == [False, False]


def test_a_fall_that_counts_is_measured_from_the_last_one_that_counted() -> None:
    early_stop = EarlyStop(3, min_improvement=0.5)
    for step, (loss, waited) in enumerate([(3.0, 0), (2.5, 1), (2.25, 0), (2.0, 1), (1.75, 2), (1.5, 0)]):
        assert not early_stop.observe(loss, step)
        assert early_stop.waited == waited
    assert EarlyStop(1, 0.0).observe(0.01, 1) is False
    small = EarlyStop(1)
    assert [small.observe(loss, 1) for loss in (1.0, 0.99)] == [False, False], "by default every fall counts"


def test_the_state_before_the_first_loss_is_plain_json_too() -> None:
    state = json.loads(json.dumps(EarlyStop(2).state(), allow_nan=False))
    assert state == {"best": None, "best_step": 0, "mark": None, "waited": 0}
    restored = EarlyStop(2, best=1.0, best_step=3, mark=1.0, waited=1)
    restored.load_state(state)
    assert restored == EarlyStop(2)
    restored.load_state({"best": 1.5, "best_step": 4, "mark": 2.5, "waited": 1})
    assert restored == EarlyStop(2, best=1.5, best_step=4, mark=2.5, waited=1)


# losses


def test_the_loss_by_token_is_that_of_the_whole_batch() -> None:
    samples = [TrainingSample("a", (1, 2, 3, 0), 2, 0.0), TrainingSample("b", (4, 5, 0), 1, 0.0)]
    batch, counts = pack(samples), count([*samples, SAMPLES[0]])
    logprobs_T = -torch.arange(1.0, 8.0)
    objective = TokenLikelihood()
    whole = objective(batch, logprobs_T, None, counts)
    places_N = batch.loss_mask_T.nonzero()[:, 0]
    shares_N = objective.token_losses(batch, counts)(logprobs_T[places_N], torch.zeros(4), places_N)
    assert places_N.tolist() == [2, 3, 5, 6]
    assert shares_N.tolist() == pytest.approx([n / 5 for n in (3, 4, 6, 7)])
    assert shares_N.dtype is torch.float32
    exact_N = objective.token_losses(batch, counts)(logprobs_T[places_N].double(), torch.zeros(4), places_N)
    assert exact_N.tolist() == pytest.approx([n / 5 for n in (3, 4, 6, 7)], rel=1e-14)
    assert float(whole.loss) == pytest.approx(20 / 5)
    assert (objective.needs_entropy, objective.logs_entropy, objective.by_token) == (False, False, True)


class TwoRanks(OneRank):
    """One of two ranks; the other one brings a loss of 5 over 2 tokens."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([5.0, 2.0])


class CountingPolicy(BigramPolicy):
    """Every token has the same probability; counts the forwards."""

    forwards = 0

    def token_logprobs(self, *args: Any, **options: Any) -> Any:
        self.forwards += 1
        return super().token_logprobs(*args, **options)


def test_the_mean_loss_is_over_the_tokens_of_all_ranks() -> None:
    samples = [TrainingSample(f"s:{number}", (1, 2, 0), 1, 0.0) for number in range(3)]
    for together in (False, True):
        measured = partial(mean_loss, collective_forward=True) if together else mean_loss
        policies = [CountingPolicy(6), CountingPolicy(6)]
        losses = [
            measured(policy, samples, TwoRanks(rank), max_sequences=1, max_tokens=0)
            for rank, policy in enumerate(policies)
        ]
        expected = [(own * math.log(6) + 5) / (own + 2) for own in (4, 2)]
        assert sorted(losses) == pytest.approx(sorted(expected))
        assert sorted(policy.forwards for policy in policies) == ([2, 2] if together else [1, 2])


def test_the_mean_loss_is_summed_in_double_precision() -> None:
    policy = BigramPolicy(6, dtype=torch.float64)
    loss = mean_loss(policy, SAMPLES, OneRank(), max_sequences=1, max_tokens=0)
    assert loss == pytest.approx(math.log(6), rel=1e-14)


def test_without_a_token_to_predict_there_is_no_loss() -> None:
    samples = [TrainingSample("s", (1, 2), 2, 0.0)]
    assert math.isnan(mean_loss(BigramPolicy(6), samples, OneRank(), max_sequences=1, max_tokens=0))


def test_a_loss_is_measured_without_a_gradient() -> None:
    made = list[bool]()

    class Watching(BigramPolicy):
        def token_logprobs(self, *args: Any, **options: Any) -> Any:
            logprobs_T, entropy_T = super().token_logprobs(*args, **options)
            made.append(logprobs_T.requires_grad)
            return logprobs_T, entropy_T

    mean_loss(Watching(6), SAMPLES, OneRank(), max_sequences=8, max_tokens=0)
    assert made == [False]


def test_without_steps_between_evaluations_there_are_those_before_and_after() -> None:
    parts = Parts()
    loop_of(parts, eval_every=0, max_steps=7, train_batch_size=1).run(parts.signals)
    assert [row["name"] for row in parts.evaluations] == ["before", "after"]
