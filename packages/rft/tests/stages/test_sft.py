"""A supervised run from its settings: which rows it trains on, what each part is given, and the order of its start."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import sft
from rft_trainer.loops.sft import SftLoop
from rft_trainer.runs.rollback import RollbackRequested


@pytest.fixture(autouse=True)
def no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows here are no texts, of which anything could be noted."""
    monkeypatch.setattr(sft, "data_notes", lambda *_, **__: ())
    monkeypatch.setattr(sft, "weight_notes", lambda *_: ())


@pytest.fixture
def read(calls: Any) -> Any:
    """Reading and rendering as doubles: six training samples and two held-out ones."""
    training = calls.double("training", mixture_of=lambda ids: ("mixture", ids))
    samples = [SimpleNamespace(sample_id=f"s{number}", num_loss_tokens=number) for number in range(6)]
    calls.put(
        sft,
        "refuse_beside_images",
        row_images="images",
        held_out_text="text",
        read_training=training,
        read_held_out="held out",
        hold_out=(samples[:4], samples[4:]),
        trained_turns="turns",
        wants_store=False,
    )
    calls.put(sft, demonstrations=(samples, [("long", 9)]))
    return calls


def settings_of(calls: Any, **numbers: Any) -> Any:
    usual = {"max_len": 0, "train_batch_size": 4, "max_epochs": 3, "max_steps": 0}
    rows = {"eval_data": "", "held_out_rows": 0, "eval_output_key": ""}
    training = calls.double("training_settings", **usual | {k: v for k, v in numbers.items() if k in usual})
    data = calls.double("data", **rows | {k: v for k, v in numbers.items() if k in rows})
    return calls.double("settings", training=training, data=data)


@pytest.mark.parametrize(("max_len", "longest"), [(0, 77), (12, 12)])
def test_rows_are_read_with_the_settings_that_name_them(read: Any, max_len: int, longest: int) -> None:
    found = sft.sft_data(settings_of(read, max_len=max_len), read.double("tokenizer"), 77)
    assert read.taken() == [
        "refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer)",
        "row_images(settings.images, settings.run.seed)",
        "trained_turns(data)",
        "wants_store(settings, tokenizer)",
        "read_training(data, data, tokenizer, images='images', label_key=None, limit_flag='--max_len', "
        f"output_key=data.output_key, prompt_max_len={longest}, turns='turns', weight_key=data.weight_key)",
        f"demonstrations(training.rendered, tokenizer, {longest})",
    ]
    ids = [f"s{number}" for number in range(6)]
    assert [sample.sample_id for sample in found.samples] == ids
    assert (found.training, found.left_out, found.held_out) == ("training", [("long", 9)], [])
    assert (found.mixture, found.num_loss_tokens) == (("mixture", ids), 15)


def test_held_out_rows_are_those_of_a_file_or_else_taken_from_the_training_rows(read: Any) -> None:
    given = settings_of(read, eval_data="e.jsonl", held_out_rows=2)
    found = sft.sft_data(given, read.double("tokenizer"), 77)
    assert read.taken()[-4:] == [
        "held_out_text(data)",
        "trained_turns(data)",
        "read_held_out('e.jsonl', data.eval_split, data.max_eval_samples, 'text', tokenizer, images='images', "
        "label_key=None, limit_flag='--max_len', output_key=data.output_key, prompt_max_len=77, turns='turns')",
        "demonstrations('held out', tokenizer, 77)",
    ]
    assert (len(found.samples), len(found.held_out)) == (6, 6)
    sft.sft_data(settings_of(read, eval_data="e.jsonl", eval_output_key="own"), read.double("tokenizer"), 77)
    assert "output_key='own'" in read.taken()[-2]
    found = sft.sft_data(settings_of(read, held_out_rows=2), read.double("tokenizer"), 77)
    assert read.taken()[-1].endswith(", 2, settings.run.seed)")
    assert [sample.sample_id for sample in found.samples] == ["s0", "s1", "s2", "s3"]
    assert [sample.sample_id for sample in found.held_out] == ["s4", "s5"]
    # the rows that are held out are not among those that an epoch visits
    assert found.mixture == ("mixture", ["s0", "s1", "s2", "s3"])


@pytest.mark.parametrize(
    ("batch", "epochs", "most", "steps"),
    [(4, 3, 0, 6), (3, 3, 0, 6), (6, 1, 0, 1), (5, 1, 0, 2), (4, 3, 5, 5), (4, 3, 9, 6)],
)
def test_a_last_batch_that_is_not_full_is_a_step(read: Any, batch: int, epochs: int, most: int, steps: int) -> None:
    given = settings_of(read, train_batch_size=batch, max_epochs=epochs, max_steps=most)
    assert sft.sft_data(given, read.double("tokenizer"), 77).num_steps == steps


PARTS = (
    "load_initial_weights adapt refuse_unknown_parts "
    "checkpoint_parts make_saver counting learning_rate_schedule balanced_forward "
    "fused_policy micro_batching Reporter EarlyStop Updater PolicyLoss make_tracer make_weight_check "
    "TokenLikelihood SftLoop"
)


def built(
    calls: Any, *, restored: Any, patience: int = 0, adapters: Any = None, **chosen: Any
) -> tuple[list[str], dict[str, Any]]:
    """The calls of a build, and what the loop is given."""
    policy = calls.double("policy", adapters=adapters)
    # names of what is copied for the best weights: adapters alone, or everything
    names = {"trainable_parameters": lambda: [("adapter", 1)], "named_parameters": lambda: [("a", 1), ("b", 2)]}
    parallel = calls.double("parallel", model=calls.double("model", adapters=adapters, **names))
    calls.put(sft, PARTS)
    calls.put(
        sft,
        weights_directory="source",
        trainable_policy=policy,
        engine_weights_directory="given weights",
        ShardablePolicy="shardable",
        parallelize=parallel,
        Progress=calls.double("progress"),
        make_guards={"policy": "guard"},
        WeightsSnapshot=calls.double("best"),
        make_ledger=calls.double("ledger"),
    )
    none: dict[str, Any] = {"label_smoothing": 0.0, "z_loss_coef": 0.0, "neftune_noise_alpha": 0.0}
    training = calls.double("training", patience=patience, **none | chosen)
    settings = calls.double("settings", training=training, evaluation=SimpleNamespace(eval_steps=-1))
    started = calls.double("started", machine=calls.double("machine"), restored=restored)
    data = calls.double("data", samples=["a", "b", "c"])
    given: dict[str, Any] = {}

    def loop(**parts: Any) -> str:
        given.update(parts)
        return "loop"

    calls.replace(sft, SftLoop=loop)
    assert sft.build_sft(settings, started, calls.double("tokenizer"), data) == "loop"
    return calls.taken(), given


def test_a_fresh_run_loads_adapts_and_distributes_before_it_saves(calls: Any) -> None:
    made, given = built(calls, restored=None)
    assert made == [
        "weights_directory(settings.adapter, settings.model.pretrain, None)",
        "trainable_policy(settings.model, settings.strategy, 'source', machine, tokenizer, settings.adapter)",
        "load_initial_weights(policy, settings.checkpoint, show=machine.is_first)",
        "engine_weights_directory(settings.checkpoint, 'source', shares_weights=True)",
        "adapt(policy, settings.adapter, None, base='given weights', seed=settings.run.seed)",
        "refuse_unknown_parts(policy, settings.optimizer)",
        "ShardablePolicy(policy)",
        "parallelize('shardable', settings.strategy, settings.optimizer, machine, None)",
        "Progress()",
        "EarlyStop(0, training.min_improvement, training.target_loss)",
        "make_guards(settings.run, started, progress, ['policy'], keeps_out=True)",
        "make_ledger(data.mixture, data.training.data_hash, 3, training.max_epochs, settings.run.seed)",
        "started.metadata(data.training.data_hash)",
        "checkpoint_parts(parallel, machine.collectives)",
        "make_saver(started.directory, settings.checkpoint, started.metadata(), checkpoint_parts(), "
        "parallel.optimizer, {'progress': progress, 'ledger': ledger, 'early_stop': EarlyStop()}, machine, None, None, "
        "resume_command=started.resume_command)",
        "TokenLikelihood()",
        "balanced_forward(settings.model, model, machine)",
        "fused_policy(parallel)",
        "PolicyLoss(model, TokenLikelihood(), balanced=balanced_forward(), fused=fused_policy())",
        "micro_batching(training.micro_train_batch_size, training.max_tokens_per_micro_batch, "
        "training.packing_samples)",
        "learning_rate_schedule(settings.optimizer, training.learning_rate, data.num_steps)",
        "counting(model, learning_rate_schedule())",
        "make_tracer(parallel, machine)",
        "Updater(PolicyLoss(), parallel.optimizer, parallel.data, "
        "collective_forward=parallel.collective_forward, device=machine.device, guard='guard', "
        "learning_rate=counting(), micro_batching=micro_batching(), "
        "pin_memory=settings.data.dataloader_pin_memory, trace=make_tracer())",
        "Reporter(started.directory, started.sinks, machine.collectives, num_steps=data.num_steps, rollout_every=0, "
        "rollouts_kept=0, seconds_before=progress.seconds)",
        "machine.phase_timer(progress)",
        "make_weight_check(settings.run, started, [parallel])",
    ]
    assert given == {
        "ledger": "ledger",
        "samples": ["a", "b", "c"],
        "held_out": "data.held_out",
        "policy": "policy",
        "updater": "Updater()",
        "evaluator": None,
        "engine": None,
        "saver": "make_saver()",
        "reporter": "Reporter()",
        "collectives": "machine.collectives",
        "data_ranks": "parallel.data",
        "collective_forward": "parallel.collective_forward",
        "progress": "progress",
        "timer": "machine.phase_timer()",
        "early_stop": "EarlyStop()",
        "train_batch_size": "training.train_batch_size",
        "max_steps": "training.max_steps",
        "eval_every": 0,
        "max_refused_in_a_row": "settings.run.max_refused_steps",
        "eval_max_sequences": "training.micro_train_batch_size",
        "eval_max_tokens": "training.max_tokens_per_micro_batch",
        "resume_command": "started.resume_command",
        "device": "machine.device",
        "best": None,
        "weight_check": "make_weight_check()",
        "averages": "parallel.averages",
    }


def test_a_run_that_continues_keeps_its_weights_its_best_ones_and_its_masks(calls: Any) -> None:
    restored = calls.double("restored")
    made, given = built(calls, restored=restored, patience=2, adapters=calls.double("adapters"))
    assert not [call for call in made if call.startswith(("load_initial_weights", "engine_weights_directory"))]
    order = [
        "adapt(policy, settings.adapter, restored, base='source', seed=settings.run.seed)",
        "parallelize('shardable', settings.strategy, settings.optimizer, machine, restored)",
        "EarlyStop(2, training.min_improvement, training.target_loss)",
        "WeightsSnapshot(parallel.weights, ['adapter'])",
        "restored.checkpoint.component('best_weights')",
        "best.restore(restored.checkpoint.component())",
        "adapters.begin_update(progress.updates)",
    ]
    assert [call for call in made if call in order] == order
    [saver] = [call for call in made if call.startswith("make_saver")]
    assert saver.endswith("machine, restored, {'best_weights': best}, resume_command=started.resume_command)")
    assert given["best"] == "best"
    made, _ = built(calls, restored=None, patience=2)
    assert "WeightsSnapshot(parallel.weights, ['a', 'b'])" in made
    assert not [call for call in made if call.startswith("best.restore")]


def test_terms_over_the_vocabulary_take_a_loss_of_their_own(calls: Any) -> None:
    calls.put(sft, "SupervisedLoss")
    made, _ = built(calls, restored=None, label_smoothing=0.1, z_loss_coef=0.2)
    assert not [call for call in made if call.startswith(("PolicyLoss", "TokenLikelihood", "fused_policy"))]
    [loss] = [call for call in made if call.startswith("SupervisedLoss")]
    assert loss.startswith("SupervisedLoss(model, Sft(")
    assert "label_smoothing=0.1, z_loss_coef=0.2" in loss


def test_noise_is_keyed_by_the_seed_and_begins_anew_with_each_update() -> None:
    policy: Any = SimpleNamespace(backbone=SimpleNamespace(noise=None))
    assert sft.with_noise(policy, float, alpha=0.0, seed=1) is float
    assert policy.backbone.noise is None
    rate = sft.with_noise(policy, lambda update: update / 10, alpha=5.0, seed=1)
    assert (rate(7), policy.backbone.noise.update, policy.backbone.noise.alpha) == (0.7, 7, 5.0)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_reads_its_data_shows_its_plan_and_begins_in_this_order(calls: Any, is_first: bool) -> None:
    machine = calls.double("machine", is_first=is_first)
    calls.put(
        sft,
        StopSignals=calls.double("signals"),
        open_machine=machine,
        requested_run="request",
        tokenizer_with_images="tokenizer",
        sft_data=calls.double("data"),
        start="started",
        build_sft="training",
        execute="ended",
    )
    calls.put(sft, "model_facts")
    resolved = calls.double("resolved")
    # what is recorded has names with commits, what is read has directories
    local = calls.double("local", settings=calls.double("settings"))
    at = calls.double("at", resolved=calls.double("fixed"))
    calls.put(sft, continuation=calls.double("begun"), with_commits=at, with_local_models=local)
    calls.put(sft, sft_contents="contents", compared_facts="facts")
    front = calls.double("front")
    assert sft.train(resolved, ["rft-train"], in_place=None, front=front) == "ended"
    assert calls.taken() == [
        "continuation(resolved, None)",
        "with_commits(begun)",
        "with_local_models(fixed)",
        "requested_run(local, None)",
        "StopSignals()",
        "signals begins",
        "open_machine(settings.model.device, 'request', settings.watch, command=['rft-train'], "
        "debug=settings.run.debug, show_error=front.show_error)",
        "machine begins",
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "sft_data(settings, 'tokenizer', model_facts().max_positions)",
        "sft_contents(local, data)",
        "compared_facts(at, machine, 'contents')",
        *(["front.show_plan(local, data, machine)"] if is_first else []),
        "start(at, ['rft-train'], machine, data.num_steps, 'facts', front=front, in_place=None)",
        "build_sft(settings, 'started', 'tokenizer', data)",
        "execute('training', 'started', signals, None)",
        "machine ends",
        "signals ends",
    ]
    sft.train(resolved, [], in_place=calls.double("place"), front=front)
    assert [call for call in calls.taken() if "place" in call] == [
        "continuation(resolved, place)",
        "requested_run(local, place)",
        "start(at, [], machine, data.num_steps, 'facts', front=front, in_place=place)",
    ]
    rollback = calls.double("rollback", run="directory", failed_step=3)

    def execute(training: Any, started: Any, signals: Any, now: Any) -> str:
        if now is None:
            raise RollbackRequested(rollback)
        assert now is rollback
        return "ended after it"

    calls.replace(sft, execute=execute)
    assert sft.train(resolved, [], front=front) == "ended after it"
    made = calls.taken()
    assert made[made.index("continuation(fixed, 'directory')") + 1 :] == [
        "start(begun, [], machine, data.num_steps, 'facts', front=front, in_place='directory')",
        "build_sft(settings, 'started', 'tokenizer', data)",
        "machine ends",
        "signals ends",
    ]


def test_the_loop_of_a_supervised_run_has_no_other_parts_than_those_it_is_given(calls: Any) -> None:
    _, given = built(calls, restored=None)
    assert set(given) <= {field.name for field in fields(SftLoop)}
