"""An RL run from its settings: what each part is given, and which parts there are."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import rl_loop as rl
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.loops.rl import RlLoop
from rft_trainer.scoring.samples import shuffle_rewards
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.run import RlRunSettings

DOUBLES = (
    "require_async_support load_initial_weights adapt refuse_unknown_parts value_head "
    "annotator old_policy balanced_forward fused_policy "
    "learning_rate_schedule micro_batching PolicyObjective PolicyLoss Updater "
    "make_tracer make_weight_check make_saver make_evaluator averaged_evaluator pretraining_term "
    "step_rules Reporter checkpoint_parts FullWeights PolicyWithCritic MismatchMonitor RolloutParts ThreadSafeReward "
    "engine_weights_directory make_engine make_replicas engine_weights engine_adapters BaseModelView ShardablePolicy "
    "load_frozen router_agreement"
)

DRAWN = SamplingOptions(temperature=0.5, max_new_tokens=20)


class Build:
    """Settings and parts of one build as doubles; `loop` is what the loop is given."""

    def __init__(self, calls: Any, **given: Any) -> None:
        self.calls = calls
        asked = {
            "staleness": 0,
            "meta": False,
            "replicas": False,
            "sleep": True,
            "can_sleep": True,
            "shares": True,
            "restored": None,
            "reference": False,
            "adapters": None,
            "critic": None,
            "save_critic": False,
            "shuffles": False,
            "keeps": False,
            "correction": None,
            "gap": 0.5,
            "fire": False,
            "environment": None,
            "step": 0,
            "best": None,
            "teacher": "",
        } | given
        double = calls.double
        self.policy = double("policy")
        self.parallel = double("parallel", model=double("model", adapters=asked["adapters"]))
        self.engine = double("engine")
        self.rollouts = double("rollouts", source=double("rollout_source"), checkpoint_parts={"ahead": "queue"})
        chosen = double("chosen", can_sleep=asked["can_sleep"], shares_weights=asked["shares"])
        critic = asked["critic"]
        calls.put(rl, DOUBLES)
        calls.put(
            rl,
            algorithm_record=double("record", needs_reference=asked["reference"]),
            weights_directory="source",
            trainable_policy=self.policy,
            parallelize=self.parallel,
            response_limits=(20, 50),
            choose_engine=chosen,
            share_frozen=double("shared", data="shared.data"),
            wants_replicas=asked["replicas"],
            is_sharded="sharded",
            credit_assigner=double("credit"),
            build_critic=critic,
            make_ledger=double("ledger"),
            build_rollouts=self.rollouts,
            sampling_options=DRAWN,
            Progress=double("progress", step=asked["step"], best_reward=asked["best"], best_step=2),
            make_guards={"policy": "policy guard"},
            constraint_of=None,
        )
        self.monitor: dict[str, Any] = {}
        self.loop: dict[str, Any] = {}
        calls.replace(rl, RlLoop=lambda **parts: self.loop.update(parts))
        calls.replace(rl, MismatchMonitor=lambda **parts: self.monitor.update(parts))
        self.settings = double(
            "settings",
            async_rollouts=SimpleNamespace(max_staleness=asked["staleness"]),
            engine=double("engine_settings", enable_engine_sleep=asked["sleep"]),
            strategy=double("strategy_settings", meta_init=asked["meta"]),
            teacher=SimpleNamespace(teacher_pretrain=asked["teacher"]),
            critic=double("critic_settings", save_value_network=asked["save_critic"]),
            reward=SimpleNamespace(shuffle_rewards=asked["shuffles"]),
            run=double("run", save_trajectories=asked["keeps"], seed=3, token_records="off"),
            algorithm=SimpleNamespace(off_policy_correction=asked["correction"], max_logprob_gap=asked["gap"]),
            evaluation=double("evaluation", keep_best=True),
            sampling=double("sampling", use_fire=asked["fire"], first_token_temperature=2.0),
        )
        directory = double("directory", logs_directory=PathLike("logs"))
        self.machine = double("machine")
        started = double("started", machine=self.machine, restored=asked["restored"], directory=directory)
        data = double("data", prompts=["a", "b"])
        rl.build_rl(
            self.settings,
            started,
            double("tokenizer"),
            data,
            double("reward"),
            compute_advantages="own advantages",  # type: ignore[arg-type]
            environment=asked["environment"],
        )
        self.made = calls.taken()

    def of(self, *names: str) -> list[str]:
        """The calls of these names, in their order."""
        return [call for call in self.made if call.partition("(")[0] in names]


class PathLike(str):
    """A folder as text."""

    def __truediv__(self, name: str) -> str:
        return f"{self}/{name}"


def test_a_run_gives_its_settings_to_the_parts_that_they_belong_to(calls: Any) -> None:
    build = Build(calls)
    assert build.made == [
        "algorithm_record(settings)",
        "require_async_support(settings, record)",
        "constraint_of(settings, tokenizer)",
        "weights_directory(settings.adapter, settings.model.pretrain, None)",
        "trainable_policy(settings.model, strategy_settings, 'source', machine, tokenizer, settings.adapter)",
        "load_initial_weights(policy, settings.checkpoint, show=machine.is_first)",
        "engine_weights_directory(settings.checkpoint, 'source', shares_weights=True)",
        "adapt(policy, settings.adapter, None, base=engine_weights_directory(), seed=3)",
        "value_head(settings)",
        "refuse_unknown_parts(policy, settings.optimizer, value_head())",
        "ShardablePolicy(policy)",
        "parallelize(ShardablePolicy(), strategy_settings, settings.optimizer, machine, None)",
        "response_limits(settings, data.longest_prompt)",
        "choose_engine(engine_settings, machine.device)",
        "engine_weights_directory(settings.checkpoint, engine_weights_directory(), shares_weights=True)",
        "wants_replicas(settings)",
        "engine_weights(parallel)",
        "engine_adapters(parallel)",
        "make_engine(engine_settings, machine, model, engine_weights_directory(), 50, adapters=engine_adapters(), "
        "dtype=parallel.compute_dtype, log_path='logs/engine-machine.ranks.rank.log', sleeps=True, "
        "weights=engine_weights())",
        "credit_assigner(settings, record, 20, 'own advantages')",
        "learning_rate_schedule(settings.optimizer, critic_settings.critic_learning_rate, data.num_updates)",
        "Progress()",
        "make_guards(run, started, progress, ['policy', 'critic'], keeps_out=False)",
        "micro_batching(settings.batch.micro_train_batch_size, settings.batch.max_tokens_per_micro_batch, "
        "settings.batch.packing_samples)",
        "build_critic(settings, machine, record, tokenizer, None, micro_batching(), learning_rate_schedule(), "
        "{'policy': 'policy guard'})",
        "machine.phase_timer(progress, parallel.meter)",
        "make_ledger(data.mixture, data.data_hash, 2, settings.batch.num_episodes, 3)",
        "sampling_options(sampling, 20, tokenizer.eos_ids)",
        f"RolloutParts(make_engine(), tokenizer, reward, ledger, data, {DRAWN!r}, "
        "machine.phase_timer(), None, 50, None)",
        "build_rollouts(settings, machine, record, policy, RolloutParts())",
        "started.metadata(data.data_hash)",
        "checkpoint_parts(parallel, machine.collectives)",
        "make_saver(started, settings.checkpoint, started.metadata(), checkpoint_parts(), parallel.optimizer, "
        "{'progress': progress, 'ledger': ledger, 'credit': credit, 'ahead': 'queue'}, tensor_parts=None)",
        "make_evaluator(make_engine(), tokenizer, reward, machine, data, 20, settings, rollouts.conversations)",
        "PolicyObjective(record, credit.coefficients)",
        "old_policy(settings, record, machine, policy, parallel)",
        "balanced_forward(settings.model, model, machine)",
        "fused_policy(parallel)",
        "PolicyLoss(model, PolicyObjective(), balanced=balanced_forward(), fused=fused_policy(), "
        "temperature=sampling.temperature)",
        "micro_batching(settings.batch.micro_train_batch_size, settings.batch.max_tokens_per_micro_batch, "
        "settings.batch.packing_samples)",
        "learning_rate_schedule(settings.optimizer, settings.optimizer.actor_learning_rate, data.num_updates)",
        "make_tracer(parallel, machine)",
        "Updater(PolicyLoss(), parallel.optimizer, parallel.data, "
        "collective_forward=parallel.collective_forward, device=machine.device, guard='policy guard', "
        "learning_rate=learning_rate_schedule(), meter=parallel.meter, micro_batching=micro_batching(), "
        "pin_memory=settings.data.dataloader_pin_memory, sample=parallel.sample, trace=make_tracer())",
        "pretraining_term(settings, data, parallel)",
        "averaged_evaluator(make_evaluator(), parallel.averages, rollouts.refresh, tells=machine.is_first)",
        "Reporter(directory, started.sinks, machine.collectives, num_steps=data.num_steps, rollout_every=0, "
        "rollouts_kept=run.num_trajectories_to_save, seconds_before=progress.seconds)",
        "step_rules(settings, data, record)",
        "make_weight_check(run, started, [parallel])",
        "wants_replicas(settings)",
        "router_agreement(engine_settings, machine, model, make_engine())",
    ]
    assert build.loop.pop("gaps") is None
    assert build.loop.pop("tokens") is None
    assert build.loop == {
        "ledger": "ledger",
        "prompts": ["a", "b"],
        "rollouts": "rollout_source",
        "assign_credit": "credit",
        "reference": None,
        "teacher": None,
        "old_policy": "old_policy()",
        "critic": None,
        "control": None,
        "updater": "Updater()",
        "pretraining": "pretraining_term()",
        "evaluator": "make_evaluator()",
        "keeps_best": True,
        "averaged": "averaged_evaluator()",
        "saver": "make_saver()",
        "reporter": "Reporter()",
        "collectives": "machine.collectives",
        "rules": "step_rules()",
        "weight_check": "make_weight_check()",
        "progress": "progress",
        "timer": "machine.phase_timer()",
        "resume_command": "started.resume_command",
        "sleep_engine": True,
        "check_engine": "rollouts.check_engine",
        "routes": "router_agreement()",
    }
    assert {*build.loop, "gaps", "tokens"} <= {field.name for field in fields(RlLoop)}


def test_a_resumed_run_takes_its_checkpoint_everywhere_and_its_engine_the_restored_step(calls: Any) -> None:
    build = Build(calls, restored=calls.double("restored"), step=4)
    assert build.of("load_initial_weights", "engine_weights_directory") == []
    assert build.of("weights_directory", "adapt", "parallelize", "build_critic", "rollout_source.load_weights") == [
        "weights_directory(settings.adapter, settings.model.pretrain, restored)",
        "adapt(policy, settings.adapter, restored, base='source', seed=3)",
        "parallelize(ShardablePolicy(), strategy_settings, settings.optimizer, machine, restored)",
        "build_critic(settings, machine, record, tokenizer, restored, micro_batching(), learning_rate_schedule(), "
        "{'policy': 'policy guard'})",
        "rollout_source.load_weights(4)",
    ]
    assert "make_engine(engine_settings, machine, model, 'source', 50" in build.of("make_engine")[0]
    # after the saver, which restores the step
    assert build.made.index(build.of("make_saver")[0]) < build.made.index("rollout_source.load_weights(4)")
    kept = [name for name in build.made if name.endswith(".keep(2)")]
    best = Build(calls, restored=calls.double("restored"), step=4, best=0.5)
    assert (kept, [name for name in best.made if name.endswith("keep(2)")]) == ([], ["make_saver().keep(2)"])
    assert build.of("make_saver")[0].startswith("make_saver(started, ")


@pytest.mark.parametrize(
    ("sleep", "can_sleep", "replicas", "shares", "staleness", "sleeps"),
    [
        (True, True, False, False, 0, True),
        (True, False, False, True, 0, False),
        (False, True, False, True, 0, False),
        (True, True, True, True, 0, True),
        (True, True, True, False, 0, False),
        (True, True, True, True, 1, False),
        (False, True, True, True, 0, False),
    ],
)
def test_an_engine_sleeps_where_it_can_is_to_and_no_rollouts_run_ahead(
    calls: Any, sleep: bool, can_sleep: bool, replicas: bool, shares: bool, staleness: int, sleeps: bool
) -> None:
    build = Build(calls, sleep=sleep, can_sleep=can_sleep, replicas=replicas, shares=shares, staleness=staleness)
    assert build.loop["sleep_engine"] is sleeps
    assert [bool(build.of(name)) for name in ("make_replicas", "make_engine")] == [replicas, not replicas]
    assert build.of("engine_weights_directory")[1].endswith(f"shares_weights={shares})")


def test_replicas_get_the_weights_of_the_policy_as_its_ranks_hold_them(calls: Any) -> None:
    build = Build(calls, replicas=True, staleness=2)
    assert build.of("make_replicas") == [
        "make_replicas(settings, machine, model, engine_weights_directory(), 50, 'logs', "
        "dtype=parallel.compute_dtype, in_blocks=parallel.shards_weights, weights=engine_weights())"
    ]
    # scored by a thread of its own, beside the evaluations
    assert build.of("ThreadSafeReward") == ["ThreadSafeReward(reward)"]
    assert build.loop["routes"] is None, "engines ahead of the trainer have other weights than it"
    assert Build(calls, replicas=True).loop["routes"] is None, "their routers are in other processes"
    assert "tokenizer, ThreadSafeReward(), ledger" in build.of("RolloutParts")[0]
    assert build.of("make_evaluator")[0].startswith("make_evaluator(make_replicas(), tokenizer, ThreadSafeReward()")


def test_a_conversation_has_the_room_of_its_environment(calls: Any) -> None:
    build = Build(calls, environment=calls.double("environment", room=calls.double("room", returns=99)))
    assert build.of("room") == ["room(settings.model.pretrain, 50, 20)"]
    assert "engine_weights_directory(), 99, " in build.of("make_engine")[0]
    assert build.of("RolloutParts")[0].endswith("environment, 99, None)")


def test_the_reference_is_the_policy_without_its_adapters_or_the_model_of_the_start(calls: Any) -> None:
    build = Build(calls, reference=True, adapters="adapters")
    assert build.loop["reference"] == "annotator()"
    assert build.of("BaseModelView", "annotator", "load_frozen") == [
        "BaseModelView(model)",
        "annotator(settings, machine, BaseModelView(), parallel.data, collective_forward=parallel.collective_forward)",
    ]
    build = Build(calls, reference=True, restored="restored")
    assert build.of("load_frozen", "load_initial_weights", "share_frozen", "annotator") == [
        "load_frozen(settings.model.pretrain, settings.model, strategy_settings, machine)",
        # the start of the run, also where the policy continues from a checkpoint
        "load_initial_weights(load_frozen(), settings.checkpoint, show=False)",
        "share_frozen(load_frozen(), strategy_settings, machine)",
        "annotator(settings, machine, load_frozen(), 'shared.data', collective_forward='sharded')",
    ]


def test_a_teacher_is_loaded_beside_the_policy_and_keeps_its_own_weights(calls: Any) -> None:
    assert Build(calls).loop["teacher"] is None
    build = Build(calls, teacher="teacher/model", restored="restored")
    assert build.loop["teacher"] == "annotator()"
    assert build.of("load_frozen", "share_frozen", "annotator") == [
        "load_frozen('teacher/model', settings.model, strategy_settings, machine)",
        "share_frozen(load_frozen(), strategy_settings, machine)",
        "annotator(settings, machine, load_frozen(), 'shared.data', collective_forward='sharded')",
    ]


def test_a_critic_is_trained_and_saved_with_the_policy_where_that_is_asked(calls: Any) -> None:
    critic = calls.double("critic", part="critic part", tensor_parts="critic tensors")
    build = Build(calls, critic=critic)
    assert build.loop["critic"] == "critic part"
    assert build.of("make_saver")[0].endswith("tensor_parts='critic tensors')")
    assert build.of("checkpoint_parts") == ["checkpoint_parts(parallel, machine.collectives)"]
    build = Build(calls, critic=critic, save_critic=True)
    assert build.of("PolicyWithCritic", "FullWeights", "checkpoint_parts") == [
        "PolicyWithCritic(model, critic.critic)",
        "FullWeights(PolicyWithCritic())",
    ]
    assert "started.metadata(), FullWeights(), parallel.optimizer" in build.of("make_saver")[0]
    assert Build(calls, save_critic=True).of("PolicyWithCritic") == []


def test_trajectories_are_kept_and_rewards_shuffled_where_that_is_asked(calls: Any) -> None:
    build = Build(calls, keeps=True, shuffles=True)
    assert "rollout_every=run.rollout_log_interval, " in build.of("Reporter")[0]
    control = build.loop["control"]
    assert isinstance(control, partial)
    assert (control.func, control.keywords) == (shuffle_rewards, {"seed": 3})


@pytest.mark.parametrize(("fire", "first"), [(True, 2.0), (False, None)])
def test_the_first_token_has_a_temperature_of_its_own_where_that_is_asked(calls: Any, fire: bool, first: Any) -> None:
    build = Build(calls, fire=fire)
    assert f"first_token_temperature={first}" in build.of("RolloutParts")[0]
    assert build.monitor["skips_first_token"] is fire


@pytest.mark.parametrize(
    ("staleness", "gap", "correction", "limit", "more"),
    [
        (0, 0.5, None, 0.5, "1 --off_policy_correction tis"),
        (0, 0.25, "tis", 0.25, "0.5"),
        (0, 0.0, None, None, "1 --off_policy_correction tis"),
        (2, 0.5, None, None, "1 --off_policy_correction tis"),
    ],
)
def test_a_gap_has_a_limit_unless_rollouts_run_ahead(
    calls: Any, staleness: int, gap: float, correction: Any, limit: Any, more: str
) -> None:
    build = Build(calls, staleness=staleness, gap=gap, correction=correction)
    assert build.monitor["limit"] == limit
    assert build.monitor["collectives"] == "machine.collectives"
    assert build.monitor["remedy"](0.5 if not correction else 0.25).startswith(
        f"started.resume_command --max_logprob_gap {more},"
    )


@pytest.mark.parametrize(
    ("kind", "keeps", "due"),
    [("shown", True, [1, 10]), ("shown", False, None), ("all", False, list(range(1, 12))), ("off", True, None)],
)
def test_tokens_are_recorded_of_the_steps_that_are_asked_for(kind: str, keeps: bool, due: list[int] | None) -> None:
    run = RlRunSettings(token_records=kind, save_trajectories=keeps, num_trajectories_to_save=4, token_records_mib=0.5)  # type: ignore[arg-type]
    settings: Any = SimpleNamespace(run=run, batch=BatchSettings(), sampling=SimpleNamespace(temperature=1.0))
    machine = SimpleNamespace(device="cpu", is_first=True, collectives="all ranks")
    started: Any = SimpleNamespace(machine=machine, directory="directory")
    parallel: Any = SimpleNamespace(model="policy", data="data ranks", collective_forward=False)
    recorder = rl._token_recorder(settings, started, parallel, None)
    if due is None:
        assert recorder is None
        return
    assert recorder is not None
    limits = recorder._limits
    assert [step for step in range(1, 12) if limits.is_due(step)] == due
    assert (limits.num_responses, limits.max_bytes) == (4 if kind == "shown" else None, 1 << 19)
