"""The parts of a loop on rows: what each is given, and the order in which a run loads, distributes and restores."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from rft.stages.supervised import parts
from rft.stages.supervised.parts import RowOrder
from rft_trainer.loops.supervised_loop import SupervisedLoop

PARTS = (
    "load_initial_weights adapt refuse_unknown_parts checkpoint_parts make_saver learning_rate_schedule "
    "micro_batching Reporter EarlyStop Updater make_tracer make_weight_check"
)
ROWS: Any = RowOrder("mixture", "hash", 3, 7)  # type: ignore[arg-type]


def built(calls: Any, *, restored: Any, patience: int = 0, adapters: Any = None) -> tuple[list[str], dict[str, Any]]:
    """The calls of a build, and the fields of the loop."""
    # names of what is copied for the best weights: adapters alone, or everything
    names = {"trainable_parameters": lambda: [("adapter", 1)], "named_parameters": lambda: [("a", 1), ("b", 2)]}
    parallel = calls.double("parallel", model=calls.double("model", adapters=adapters, **names))
    calls.put(parts, PARTS)
    calls.put(
        parts,
        weights_directory="source",
        trainable_policy=calls.double("policy", adapters=adapters),
        engine_weights_directory="given weights",
        ShardablePolicy="shardable",
        parallelize=parallel,
        Progress=calls.double("progress"),
        make_guards={"policy": "guard"},
        WeightsSnapshot=calls.double("best"),
        make_ledger=calls.double("ledger"),
    )
    training = calls.double("training", patience=patience)
    settings = calls.double("settings", training=training, evaluation=SimpleNamespace(eval_steps=-1))
    started = calls.double("started", machine=calls.double("machine"), restored=restored)
    state = parts.policy_state(settings, started, calls.double("tokenizer"), ROWS)
    given: Any = state.loop_parts("loss", state.learning_rates())  # type: ignore[arg-type]
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
        "checkpoint_parts(parallel, machine.collectives)",
        "EarlyStop(0, training.min_improvement, training.target_loss)",
        "Progress()",
        "make_guards(settings.run, started, progress, ['policy'], keeps_out=True)",
        "make_ledger('mixture', 'hash', 3, training.max_epochs, settings.run.seed)",
        "started.metadata('hash')",
        "make_saver(started, settings.checkpoint, started.metadata(), checkpoint_parts(), parallel.optimizer, "
        "{'progress': progress, 'ledger': ledger, 'early_stop': EarlyStop()}, None)",
        "model.begin_update(progress.updates)",
        "learning_rate_schedule(settings.optimizer, training.learning_rate, 7)",
        "micro_batching(training.micro_train_batch_size, training.max_tokens_per_micro_batch, "
        "training.packing_samples)",
        "make_tracer(parallel, machine)",
        "Updater('loss', parallel.optimizer, parallel.data, "
        "collective_forward=parallel.collective_forward, device=machine.device, guard='guard', "
        "learning_rate=learning_rate_schedule(), meter=parallel.meter, micro_batching=micro_batching(), "
        "pin_memory=settings.data.dataloader_pin_memory, sample=parallel.sample, trace=make_tracer())",
        "Reporter(started.directory, started.sinks, machine.collectives, num_steps=7, rollout_every=0, "
        "rollouts_kept=0, seconds_before=progress.seconds)",
        "machine.phase_timer(progress, parallel.meter)",
        "make_weight_check(settings.run, started, [parallel])",
    ]
    assert given == {
        "ledger": "ledger",
        "updater": "Updater()",
        "saver": "make_saver()",
        "reporter": "Reporter()",
        "collectives": "machine.collectives",
        "progress": "progress",
        "timer": "machine.phase_timer()",
        "early_stop": "EarlyStop()",
        "train_batch_size": "training.train_batch_size",
        "max_steps": "training.max_steps",
        "eval_every": -1,
        "max_refused_in_a_row": "settings.run.max_refused_steps",
        "resume_command": "started.resume_command",
        "best": None,
        "weight_check": "make_weight_check()",
        "averages": "parallel.averages",
    }
    # the stage that can keep its best checkpoint says so itself
    assert set(given) | {"keeps_best"} == {field.name for field in fields(SupervisedLoop) if field.init}


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
        "model.begin_update(progress.updates)",
    ]
    assert [call for call in made if call in order] == order
    [saver] = [call for call in made if call.startswith("make_saver")]
    assert saver.endswith("{'best_weights': best})")
    assert given["best"] == "best"
    made, _ = built(calls, restored=None, patience=2)
    assert "WeightsSnapshot(parallel.weights, ['a', 'b'])" in made
    assert not [call for call in made if call.startswith("best.restore")]
