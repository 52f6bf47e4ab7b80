"""One step of the RL loop in detail: the order of what it calls, what each part is given, and what is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rft_core.errors import NumericsError, SavedAfterSignal, ServiceError
from rft_trainer.batches.prompt_ledger import Ledger, LedgerEntry
from rft_trainer.evaluation.evaluator import EvaluationResult
from rft_trainer.loops.rl import CriticTrainer, OldPolicyScorer, RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Counts, Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import PolicyScores
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import build_samples, flat_rollouts
from rft_trainer.testing.bigram import OneRank
from rft_trainer.update.optimizer_step import UpdateOutcome

PROMPTS = [Prompt(f"p:{number}", (1, 2, number), "?", "x", "p") for number in range(6)]
RULES = StepConfig(
    prompts_per_rollout=2,
    rollouts_per_step=1,
    train_batch_size=4,
    epochs_per_step=1,
    skip_zero_advantage=False,
    filter_groups=False,
    refill_rounds=0,
    smallest_group=2,
    needs_baseline=False,
    frozen_steps=0,
    max_steps=1,
    eval_every=0,
    max_refused_in_a_row=0,
    max_unscored_share=0.0,
)
SOUND = UpdateOutcome(1.0, True, 0.5, 1)
REFUSED = UpdateOutcome(math.inf, False, 0.5, 1)
FAILED = {"reward": None, "status": RewardStatus.FAILED}

Made = Callable[[LedgerEntry, int], dict[str, Any]]


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
class CriticOf:
    """The updater of a critic, which is called."""

    update: Callable[..., UpdateOutcome]

    def __call__(self, *batch: Any) -> UpdateOutcome:
        return self.update(*batch)

    def see(self, metrics: object) -> None: ...


@dataclass
class Parts:
    """Stands for every collaborator of a loop: notes what is called in order, and returns what a test has set."""

    made: Made = lambda entry, index: {}
    """Fields in which the rollout of (entry, sample index) differs from the usual one."""
    outcomes: list[UpdateOutcome] = field(default_factory=list[UpdateOutcome])
    critic_outcomes: list[UpdateOutcome] = field(default_factory=list[UpdateOutcome])
    signal_at: str = ""
    """The event at which a signal arrives."""
    save_is_due: bool = False
    saved_step: int | None = None
    version: int = 0
    events: list[str] = field(default_factory=list[str])
    collected: list[list[str]] = field(default_factory=list[list[str]])
    updated: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    scores: list[PolicyScores] = field(default_factory=list[PolicyScores])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    signals: StopSignals = field(default_factory=StopSignals)

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self.signal_at:
            self.signals.received = "SIGTERM"

    def steps_of(self, word: str) -> list[str]:
        return [event for event in self.events if event.split()[0] == word]

    def enter_phase(self, name: str | None) -> None:
        self.note(f"<{name}" if name else ">")

    def end_step(self) -> None: ...

    def load_weights(self, version: int) -> None:
        self.version = version
        self.note(f"load {version}")

    def check_engine(self, version: int) -> dict[str, tuple[float, float]]:
        self.note(f"check {version}")
        return {"engine/served": (3.0, 4.0)}

    def source_metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, object]:
        self.note("metrics")
        return {"source/groups": len(groups)}

    def collect(self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: object) -> list[RolloutGroup]:
        self.note(f"collect {len(entries)}")
        self.collected.append([prompt.prompt_id for prompt in prompts])
        return [
            RolloutGroup(prompt, entry.epoch, entry.position, tuple(self.rollout(prompt, entry, i) for i in range(2)))
            for entry, prompt in zip(entries, prompts, strict=True)
        ]

    def rollout(self, prompt: Prompt, entry: LedgerEntry, index: int) -> Rollout:
        """Two tokens of the version that is served; the first sample of a prompt is right."""
        text, status = "said", RewardStatus.OK
        usual = Rollout(
            prompt.prompt_id, index, (4, 9), (-0.5, -0.25), (0.0, 0.0), "stop", self.version, text, 1.0 - index, status
        )
        return replace(usual, **self.made(entry, index))

    def __call__(self, groups: Sequence[RolloutGroup], scores: PolicyScores, *, step: int):
        """Give credit: the advantage of a response is its reward."""
        self.note(f"credit {step}")
        self.scores.append(scores)
        advantages = [rollout.reward or 0.0 for _, rollout in flat_rollouts(groups)]
        return build_samples(groups, advantages, scores.old, []), {"credit/mean": (3.0, 2.0), "credit/none": (1.0, 0)}

    def control(self, merged: Mapping[str, float], num_samples: int) -> dict[str, object]:
        return {"control/samples": num_samples, "control/credit": merged.get("credit/mean")}

    def update(
        self, samples: Sequence[TrainingSample], number: int, totals: object, counts: Counts, gaps: object
    ) -> UpdateOutcome:
        self.note(f"update {number}")
        self.updated.append({"samples": [s.sample_id[4:] for s in samples], "counts": counts, "gaps": gaps})
        return self.outcomes.pop(0) if self.outcomes else SOUND

    def update_critic(self, samples: Sequence[TrainingSample], number: int, totals: object) -> UpdateOutcome:
        self.note(f"critic {number}")
        return self.critic_outcomes.pop(0) if self.critic_outcomes else SOUND

    def critic_values(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        return two_of(0.5, groups)

    def evaluate(self) -> EvaluationResult:
        self.note("evaluate")
        return EvaluationResult((1.0, None), (True, None), 0, 2.0)

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

    def words(self, step: int) -> str:
        return f"checkpoint of step {step}"

    def wait(self) -> None: ...


def loop_of(parts: Parts, rules: StepConfig = RULES, episodes: int = 2, **changed: Any) -> RlLoop:
    ledger = Ledger(len(PROMPTS), episodes, lambda epoch: range(len(PROMPTS)), data_hash="d", seed=1)
    collaborators: dict[str, Any] = {
        "ledger": ledger,
        "prompts": PROMPTS,
        "rollouts": SimpleNamespace(
            reserve=ledger.reserve,
            collect=parts.collect,
            metrics=parts.source_metrics,
            load_weights=parts.load_weights,
            wake=lambda: parts.note("wake"),
            sleep=lambda level: parts.note(f"sleep {level}"),
        ),
        "assign_credit": parts,
        "reference": None,
        "old_policy": None,
        "critic": None,
        "control": None,
        "updater": UpdaterOf(parts.update),
        "evaluator": parts.evaluate,
        "saver": parts,
        "reporter": SimpleNamespace(
            step=parts.report,
            rollouts=lambda groups, progress, advantages: parts.note(f"rollouts {len(groups)} {progress.step}"),
            evaluation=parts.report_evaluation,
        ),
        "collectives": OneRank(),
        "rules": rules,
        "progress": Progress(),
        "timer": PhaseTimer(clock=lambda: 0.0, listener=parts),
        "resume_command": "rft-train resume here",
        "sleep_engine": False,
    }
    return RlLoop(**{**collaborators, **changed})


def with_critic(parts: Parts) -> CriticTrainer:
    return CriticTrainer(cast(Any, parts.critic_values), cast(Any, CriticOf(parts.update_critic)))


def test_a_run_does_everything_in_its_order_and_its_phase() -> None:
    parts = Parts(save_is_due=True)
    loop = loop_of(parts, replace(RULES, max_steps=2, eval_every=1), sleep_engine=True, check_engine=parts.check_engine)
    results = loop.run(parts.signals)

    def step(number: int, evaluation: str, *saved: str) -> list[str]:
        return [
            *("wake", "collect 2", "sleep 1"),
            *("<logprob", f"credit {number - 1}", ">", "<train", f"update {number - 1}", ">"),
            *("metrics", "<sync", f"load {number}", "wake", f"check {number}", ">"),
            *(f"report {number}", f"rollouts 2 {number}"),
            *("<eval", "wake", "evaluate", ">", f"report {evaluation}"),
            *(f"due {number} None", "<save", f"save {number} of 0", ">"),
        ]

    before = ["<eval", "wake", "evaluate", ">", "report before", "save 0 of 0"]
    assert parts.events == [*before, *step(1, "step 1"), *step(2, "after")]
    assert list(results) == ["before", "step 1", "after"]
    assert [(row["name"], row["step"]) for row in parts.evaluations] == [("before", 0), ("step 1", 1), ("after", 2)]
    assert parts.evaluations[0]["rewards"] == (1.0, None)
    assert parts.evaluations[0]["correct"] == (True, None)
    assert parts.evaluations[0]["eval/accuracy"] == 1.0


def test_a_resumed_run_neither_evaluates_nor_saves_before_its_first_step() -> None:
    parts = Parts(saved_step=0)
    loop_of(parts).run(parts.signals)
    assert parts.events[0] == "wake"
    assert [row["name"] for row in parts.evaluations] == ["after"]
    assert parts.steps_of("save") == ["save 1 of 0"]


def test_a_run_without_held_out_prompts_evaluates_nothing() -> None:
    parts = Parts()
    assert loop_of(parts, replace(RULES, eval_every=1), evaluator=None).run(parts.signals) == {}
    assert "<eval" not in parts.events


def test_an_evaluation_comes_after_every_so_many_steps_and_a_save_where_it_is_due() -> None:
    parts = Parts()
    loop_of(parts, replace(RULES, max_steps=5, eval_every=2)).run(parts.signals)
    assert [row["name"] for row in parts.evaluations] == ["before", "step 2", "step 4", "after"]
    assert parts.steps_of("save") == ["save 0 of 0", "save 5 of 1"]
    assert parts.steps_of("due") == ["due 1 None", "due 2 None", "due 3 1", "due 4 None", "due 5 None"]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_checkpoint_of_the_best_evaluation_is_saved_and_kept(keeps: bool) -> None:
    parts = Parts()
    rewards = iter((0.25, 0.5, None, 0.75, 0.5, 0.625))
    kept: list[int] = []
    cast(Any, parts).keep = kept.append

    def evaluate() -> EvaluationResult:
        reward = next(rewards)
        return EvaluationResult((reward,), (False,), 0, 2.0)

    loop = loop_of(parts, replace(RULES, max_steps=5, eval_every=1), evaluator=evaluate, keeps_best=keeps)
    loop.run(parts.signals)
    assert kept == ([0, 1, 3] if keeps else [])
    saved = ["save 0 of 0", "save 1 of 0", "save 3 of 1", "save 5 of 1"]
    assert parts.steps_of("save") == (saved if keeps else [saved[0], saved[-1]])
    told = [row.get("eval/best_step") for row in parts.evaluations]
    # an evaluation without a score is none to compare
    assert told == ([0, 1, None, 3, 3, 3] if keeps else [None] * 6)


def test_a_run_ends_with_its_last_episode_where_no_number_of_steps_is_given() -> None:
    parts = Parts()
    loop = loop_of(parts, replace(RULES, max_steps=0))
    loop.run(parts.signals)
    assert loop.progress.step == 6
    assert parts.steps_of("due")[-1] == "due 6 2"


def test_a_step_may_have_a_single_prompt() -> None:
    parts = Parts()
    loop_of(parts, replace(RULES, prompts_per_rollout=1, max_steps=0), episodes=1).run(parts.signals)
    assert parts.steps_of("due") == [*(f"due {step} None" for step in range(1, 6)), "due 6 1"]


def test_a_step_of_two_rollouts_samples_them_one_after_the_other_and_trains_them_in_batches() -> None:
    parts = Parts()
    loop = loop_of(parts, replace(RULES, rollouts_per_step=2, train_batch_size=3, epochs_per_step=2))
    done = loop.train_step(parts.signals)
    assert parts.collected == [["p:0", "p:1"], ["p:2", "p:3"]]
    names = [f"p:{number}#{index}" for number in range(4) for index in range(2)]
    passes = [names[:3], names[3:6], names[6:]]
    assert [row["samples"] for row in parts.updated] == [*passes, *passes]
    assert [row["counts"] for row in parts.updated] == [Counts(6, 3, 3), Counts(6, 3, 3), Counts(4, 2, 2)] * 2
    assert parts.steps_of("update") == [f"update {number}" for number in range(6)]
    assert loop.progress.updates == 6
    assert [group.prompt.prompt_id for group in done.data] == ["p:0", "p:1", "p:2", "p:3"]
    row = parts.rows[0]
    assert row == {**done.metrics, "num_samples": 8, "num_tokens": 8 * 5}
    assert (row["source/groups"], row["control/samples"]) == (4, 8)
    assert row["credit/mean"] == row["control/credit"] == 1.5
    assert "credit/none" not in row, "nothing was counted for it"
    assert (row["data/prompts"], row["policy/updates"]) == (4, 6)
    assert not any(name.startswith(("critic/", "gaps/", "engine/")) for name in row)


def test_what_the_engine_serves_is_a_metric_of_the_step() -> None:
    parts = Parts()
    loop_of(parts, check_engine=parts.check_engine).run(parts.signals)
    assert parts.rows[0]["engine/served"] == 0.75


def test_routers_are_compared_before_the_engine_sleeps_and_their_agreement_is_a_metric_of_the_step() -> None:
    parts = Parts()

    def routes(step: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        parts.note(f"routes {step} of {len(groups)}")
        return {"engine/router_agreement": 0.5} if step == 1 else {}

    loop = loop_of(parts, replace(RULES, max_steps=2), sleep_engine=True, routes=routes)
    loop.run(parts.signals)
    compared = [event for event in parts.events if event.split()[0] in ("collect", "routes", "sleep")]
    assert compared == ["collect 2", "routes 1 of 2", "sleep 1", "collect 2", "routes 2 of 2", "sleep 1"]
    assert [row.get("engine/router_agreement") for row in parts.rows] == [0.5, None]


def test_samples_without_advantage_are_left_out_of_the_forward_and_stay_in_the_denominators() -> None:
    parts, all_of_them = Parts(), Parts()
    loop_of(parts, replace(RULES, skip_zero_advantage=True)).run(parts.signals)
    loop_of(all_of_them).run(all_of_them.signals)
    assert parts.updated[0]["samples"] == ["p:0#0", "p:1#0"]
    assert len(all_of_them.updated[0]["samples"]) == 4
    assert parts.updated[0]["counts"] == all_of_them.updated[0]["counts"] == Counts(8, 4, 4)


def test_the_gap_to_the_engine_is_looked_at_in_the_first_update_of_each_step() -> None:
    parts = Parts()
    gaps = SimpleNamespace(begin=lambda where, state: parts.note(f"gaps {where}"), metrics={"gaps/largest": 0.5})
    loop_of(parts, replace(RULES, train_batch_size=2, max_steps=2), gaps=gaps).run(parts.signals)
    assert [row["gaps"] is gaps for row in parts.updated] == [True, False, True, False]
    assert [row["gaps"] is None for row in parts.updated] == [False, True, False, True]
    assert parts.steps_of("gaps") == ["gaps step 1", "gaps step 2"]
    assert parts.rows[0]["gaps/largest"] == 0.5


def test_in_frozen_steps_the_critic_alone_is_trained_and_both_schedules_go_on() -> None:
    parts = Parts(critic_outcomes=[UpdateOutcome(2.0, True, 0.25, 3)])
    gaps = SimpleNamespace(begin=lambda where, state: None, metrics={"gaps/largest": 0.5})
    rules = replace(RULES, frozen_steps=1, max_steps=2)
    loop_of(parts, rules, critic=with_critic(parts), gaps=gaps).run(parts.signals)
    updates = [event for event in parts.events if event.startswith(("critic", "update"))]
    assert updates == ["critic 0", "critic 1", "update 1"]
    first, second = parts.rows
    assert (first["policy/updates"], first["policy/micro_batches"], first["policy/updates_refused"]) == (0, 0, 0)
    assert math.isnan(first["policy/gradient_norm"])
    assert math.isnan(first["policy/learning_rate"])
    assert "gaps/largest" not in first, "no update had samples to compare"
    critic = {name: first[f"critic/{name}"] for name in ("gradient_norm", "learning_rate", "micro_batches", "updates")}
    assert critic == {"gradient_norm": 2.0, "learning_rate": 0.25, "micro_batches": 3, "updates": 1}
    assert (second["policy/updates"], second["gaps/largest"]) == (1, 0.5)


def test_metrics_of_updates_leave_out_the_norm_of_those_that_were_refused() -> None:
    outcomes = [UpdateOutcome(1.0, True, 0.5, 1), UpdateOutcome(math.nan, False, 0.25, 2)]
    parts = Parts(outcomes=[*outcomes, UpdateOutcome(3.0, True, 0.125, 3)])
    loop_of(parts, replace(RULES, epochs_per_step=3, max_refused_in_a_row=1)).run(parts.signals)
    row = {name.removeprefix("policy/"): value for name, value in parts.rows[0].items() if name.startswith("policy/")}
    assert row == {
        "gradient_norm": 2.0,
        "learning_rate": 0.125,
        "updates": 2,
        "updates_refused": 1,
        "micro_batches": 6,
        "advantage_agreement": 1.0,
    }


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_only_refused_updates_in_a_row_end_a_run(part: str) -> None:
    script = [REFUSED, REFUSED, SOUND, REFUSED, REFUSED, REFUSED]
    parts = Parts(outcomes=list(script)) if part == "actor" else Parts(critic_outcomes=list(script))
    rules = replace(RULES, max_refused_in_a_row=2, epochs_per_step=3, max_steps=2)
    loop = loop_of(parts, rules, critic=with_critic(parts))
    with pytest.raises(NumericsError) as caught:
        loop.run(parts.signals)
    problem = caught.value.problem
    assert problem.code == "numerics.non_finite"
    assert problem.where == "step 2, update 6; samples 0/2/p:2#0, 0/2/p:2#1, 0/3/p:3#0"
    assert f"--{part}_learning_rate" in problem.do
    counts = loop.progress
    assert counts.refused == {"policy": 3 * (part == "actor"), "critic": 3 * (part == "critic")}


def test_without_a_second_forward_the_engine_s_probabilities_stand_for_those_of_the_policy() -> None:
    parts = Parts()
    loop_of(parts).run(parts.signals)
    [scores] = parts.scores
    assert list(scores.old) == list(scores.behaviour) == [(-0.5, -0.25)] * 4
    assert (list(scores.reference), list(scores.values), list(scores.entropy)) == ([], [], [])


def two_of(value: float, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
    """The value twice, for two tokens of every response."""
    return [(value, value) for _ in flat_rollouts(groups)]


def test_reference_critic_and_old_policy_score_what_is_kept() -> None:
    parts = Parts(made=lambda entry, index: FAILED if (entry.position, index) == (0, 1) else {})
    old = SimpleNamespace(scores=lambda groups, behaviour: (two_of(-1.0, groups), two_of(2.0, groups)))
    reference = partial(two_of, -3.0)
    rules = replace(RULES, max_unscored_share=0.25)
    loop_of(parts, rules, old_policy=old, reference=reference, critic=with_critic(parts)).run(parts.signals)
    [scores] = parts.scores
    assert list(scores.behaviour) == [(-0.5, -0.25)] * 2, "one of a group of two has nothing to be compared with"
    assert (list(scores.old), list(scores.entropy)) == ([(-1.0, -1.0)] * 2, [(2.0, 2.0)] * 2)
    assert (list(scores.reference), list(scores.values)) == ([(-3.0, -3.0)] * 2, [(0.5, 0.5)] * 2)
    assert (parts.rows[0]["drop/unscored"], parts.rows[0]["drop/alone_in_group"]) == (1, 1)


class Scorer:
    """A policy that scores responses; notes how often it runs forward."""

    def __init__(self) -> None:
        self.forwards: list[str] = []

    def __call__(self, groups: object) -> list[tuple[float, ...]]:
        self.forwards.append("logprobs")
        return [(-1.0,)]

    def entropies(self, groups: object) -> list[tuple[float, ...]]:
        self.forwards.append("entropies")
        return [(2.0,)]

    def with_entropies(self, groups: object) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        self.forwards.append("both")
        return [(-1.0,)], [(2.0,)]


@pytest.mark.parametrize(
    ("logprobs", "entropy", "forwards", "expected"),
    [
        (True, True, ["both"], ([(-1.0,)], [(2.0,)])),
        (True, False, ["logprobs"], ([(-1.0,)], [])),
        (False, True, ["entropies"], ([(-0.5,)], [(2.0,)])),
        (False, False, [], ([(-0.5,)], [])),
    ],
)
def test_the_old_policy_runs_forward_once_for_what_is_asked_for(
    logprobs: bool, entropy: bool, forwards: list[str], expected: object
) -> None:
    scorer = Scorer()
    assert OldPolicyScorer(cast(LogprobScorer, scorer), logprobs, entropy).scores([], [(-0.5,)]) == expected
    assert scorer.forwards == forwards


@pytest.mark.parametrize(
    ("lag", "fields", "is_refused"),
    [
        (0, {"weight_version": 2}, False),
        (0, {"weight_version": 1}, True),
        (0, {"weight_version": 3}, True),
        (0, {"weight_version": 2, "version_spans": ((2, 1), (3, 1))}, True),
        (1, {"weight_version": 1}, False),
        (1, {"weight_version": 1, "version_spans": ((1, 1), (2, 1))}, False),
        (1, {"weight_version": 0}, True),
        (0, {"weight_version": 0, "turns": (Turn(False, 2, ""),)}, False),
    ],
)
def test_samples_of_versions_that_are_not_allowed_end_the_run(
    lag: int, fields: dict[str, Any], is_refused: bool
) -> None:
    parts = Parts(made=lambda entry, index: fields if (entry.position, index) == (5, 1) else {})
    loop = loop_of(parts, replace(RULES, max_steps=3, max_staleness=lag))
    if not is_refused:
        loop.run(parts.signals)
        assert loop.progress.step == 3
        return
    with pytest.raises(ServiceError) as caught:
        loop.run(parts.signals)
    assert caught.value.problem.code == "engine.stale"
    assert caught.value.problem.where == "step 3, p:5#1"
    assert loop.progress.step == 2


def test_a_probability_that_is_not_finite_ends_the_run_before_an_update() -> None:
    parts = Parts(made=lambda entry, index: {"behaviour_logprobs": (-0.5, math.nan)} if index else {})
    with pytest.raises(NumericsError) as caught:
        loop_of(parts).run(parts.signals)
    assert caught.value.problem.code == "numerics.sampled_logprobs"
    assert caught.value.problem.where.startswith("step 1;")
    assert parts.updated == []


def test_as_many_rewards_may_be_missing_as_the_share_allows() -> None:
    def missing(entry: LedgerEntry, index: int) -> dict[str, Any]:
        return {**FAILED, "response_text": "z" * 90} if entry.position == 1 else {}

    parts = Parts(made=missing)
    loop_of(parts, replace(RULES, max_unscored_share=0.5)).run(parts.signals)
    assert parts.updated[0]["samples"] == ["p:0#0", "p:0#1"]
    parts = Parts(made=missing)
    with pytest.raises(ServiceError) as caught:
        loop_of(parts, replace(RULES, max_unscored_share=0.49)).run(parts.signals)
    assert caught.value.problem.code == "reward.too_many_failed"
    assert caught.value.problem.where.endswith(f"p:1#0 (failed): response {'z' * 80!r}")
    assert parts.updated == []


def test_a_step_in_which_nothing_was_scored_changes_nothing_and_is_reported() -> None:
    parts = Parts(made=lambda entry, index: FAILED)
    loop = loop_of(parts, replace(RULES, max_unscored_share=1.0), reference=lambda groups: pytest.fail("no forward"))
    loop.assign_credit = cast(Any, SimpleNamespace(control=lambda merged, num_samples: {}))
    loop.run(parts.signals)
    assert (parts.updated, parts.rows[0]["drop/unscored"], parts.rows[0]["policy/updates"]) == ([], 4, 0)
    assert loop.progress.step == 1


def test_groups_without_signal_are_replaced_by_as_many_prompts_as_are_missing() -> None:
    parts = Parts(made=lambda entry, index: {"reward": 1.0} if entry.position in (0, 2, 3) else {})
    rules = replace(RULES, filter_groups=True, refill_rounds=5)
    loop = loop_of(parts, rules)
    loop.run(parts.signals)
    assert parts.collected == [["p:0", "p:1"], ["p:2"], ["p:3"], ["p:4"]]
    assert parts.updated[0]["samples"] == ["p:1#0", "p:1#1", "p:4#0", "p:4#1"]
    assert loop.ledger.counts()["trained"] == 5
    capped = Parts(made=parts.made)
    loop_of(capped, replace(rules, refill_rounds=1)).run(capped.signals)
    assert capped.collected == [["p:0", "p:1"], ["p:2"]]


def test_prompts_of_the_next_epoch_are_given_back_by_a_refill() -> None:
    parts = Parts(made=lambda entry, index: {"reward": 1.0} if entry.epoch == 0 else {})
    loop_of(parts, replace(RULES, prompts_per_rollout=4, filter_groups=True, refill_rounds=5, max_steps=2)).run(
        parts.signals
    )
    first, second = [f"p:{number}" for number in range(4)], [f"p:{number}" for number in (4, 5)]
    assert parts.collected == [first, second, first]


def test_the_rewards_that_are_trained_on_are_those_of_the_control() -> None:
    parts = Parts()
    shuffled: list[Sequence[RolloutGroup]] = []

    def control(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        shuffled.append(groups)
        return list(groups[:1])

    loop_of(parts, control=control).run(parts.signals)
    assert len(shuffled[0]) == 2
    assert parts.updated[0]["samples"] == ["p:0#0", "p:0#1"]
    assert (parts.rows[0]["data/prompts"], parts.rows[0]["num_samples"]) == (2, 4)


def test_a_signal_during_rollouts_keeps_the_last_step_and_one_during_an_update_the_new_one() -> None:
    for event, step, trained in (("collect 2", 0, 0), ("update 0", 1, 2)):
        parts = Parts(signal_at=event)
        loop = loop_of(parts, replace(RULES, max_steps=3))
        with pytest.raises(SavedAfterSignal) as caught:
            loop.run(parts.signals)
        assert caught.value.problem.code == "run.stopped"
        assert (parts.saved_step, loop.progress.step) == (step, step)
        assert (len(parts.updated), loop.ledger.counts()["trained"]) == (step, trained)


def test_a_signal_in_the_last_step_lets_the_run_finish() -> None:
    parts = Parts(signal_at="update 0")
    assert list(loop_of(parts).run(parts.signals)) == ["before", "after"]
    assert parts.saved_step == 1


def test_the_averages_are_evaluated_after_the_first_step() -> None:
    parts = Parts()
    averaged = SimpleNamespace(called=0)

    def looks() -> EvaluationResult:
        averaged.called += 1
        return EvaluationResult((0.0, 0.0), (False, False), 1, 3.0)

    loop_of(parts, averaged=looks).run(parts.signals)
    assert averaged.called == 1
    before, after = parts.evaluations
    assert "eval_ema/accuracy" not in before
    assert (after["eval/accuracy"], after["eval_ema/accuracy"], after["ema_correct"]) == (1.0, 0.0, (False, False))


def test_every_update_of_the_policy_has_the_pretraining_rows_of_its_number() -> None:
    added: list[Any] = []

    class Both(UpdaterOf):
        def forward_backward(self, *batch: Any, loss: Any = None) -> None:
            if loss is None:
                super().forward_backward(*batch)
            else:
                added.append((batch[0], batch[1], batch[3], loss))

    parts = Parts()
    term: Any = SimpleNamespace(
        rows=SimpleNamespace(batch=lambda number: SimpleNamespace(samples=f"rows {number}", counts=f"counts {number}")),
        loss="its loss",
    )
    rules = replace(RULES, max_steps=1, epochs_per_step=2)
    loop_of(parts, rules, updater=Both(parts.update), pretraining=term).run(parts.signals)
    assert parts.steps_of("update") == ["update 0", "update 1"]
    assert added == [(f"rows {n}", n, f"counts {n}", "its loss") for n in (0, 1)]


def test_a_critic_that_learns_alone_takes_no_pretraining_rows() -> None:
    parts = Parts()
    term: Any = SimpleNamespace(rows=SimpleNamespace(batch=lambda number: pytest.fail("no update of the policy")))
    rules = replace(RULES, max_steps=1, frozen_steps=1)
    loop_of(parts, rules, critic=with_critic(parts), pretraining=term).run(parts.signals)
    assert parts.steps_of("update") == []
