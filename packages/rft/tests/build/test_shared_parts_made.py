"""Parts that commands build alike: what savers, evaluators and routers' losses are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import shared_parts
from rft_algos.schedules import learning_rate
from rft_dist.settings import AdamSettings
from rft_models.settings import RouterSettings
from rft_trainer.data.mixture import Mixture
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.update.moe_aux_loss import RouterWeights
from rft_trainer.update.optimizer_step import MicroBatching


@pytest.mark.parametrize("continues", [True, False])
def test_a_saver_syncs_before_it_saves_and_restores_where_a_run_continues(calls: Any, continues: bool) -> None:
    calls.put(shared_parts, "make_writer save_schedule", Saver=calls.double("saver"))
    restored = calls.double("restored") if continues else None
    started = calls.double("started", restored=restored, directory=calls.double("directory"), resume_command="again")
    given = [calls.double(name) for name in ("settings", "metadata", "policy", "optimizer", "parts")]
    found = shared_parts.make_saver(started, *given, {"best": "tensors"})  # type: ignore[dict-item]
    assert found == "saver"
    assert calls.taken() == [
        f"make_writer(directory, settings, metadata, started.machine.collectives, {restored!r})",
        "save_schedule(settings)",
        "Saver(make_writer(), policy, optimizer, parts, started.machine.collectives, before_save=directory.sync, "
        "model_only=settings.save_model_only, resume_command='again', schedule=save_schedule(), "
        "tensor_parts={'best': 'tensors'})",
        *(["restored.records()", "saver.restore(restored.step, restored.records())"] if continues else []),
    ]


@pytest.mark.parametrize(
    ("coefficient", "routers", "weights"),
    [
        (0.0, None, RouterWeights()),
        (0.5, None, RouterWeights(0.5)),
        (0.0, RouterSettings(), RouterWeights()),
        (0.5, RouterSettings(router_z_loss_coef=0.1, balance_bias_rate=0.01), RouterWeights(0.5, 0.1, 0.01, 0.001)),
    ],
)
def test_routers_are_trained_where_they_have_a_weight_and_watched_where_they_could(
    calls: Any, coefficient: float, routers: RouterSettings | None, weights: RouterWeights
) -> None:
    calls.put(shared_parts, "MoeAuxLoss")
    settings: Any = SimpleNamespace(aux_loss_coef=coefficient)
    policy = calls.double("policy", backbone=SimpleNamespace(split=None), is_compiled=False, has_known_routers=True)
    passed = calls.double("passed")
    assert shared_parts.balanced_forward(settings, policy, calls.double("machine"), routers, passed) is not None
    assert calls.taken() == [f"MoeAuxLoss(policy, {weights!r}, collectives=machine.collectives, passed=passed)"]


@pytest.mark.parametrize(
    ("split", "compiled", "has_routers", "routers"),
    [("ranks", False, True, RouterSettings()), (None, False, False, RouterSettings()), (None, True, True, None)],
)
def test_routers_are_not_watched_where_they_are_not_known_or_rows_are_shared_or_it_would_break_graphs(
    calls: Any, split: str | None, compiled: bool, has_routers: bool, routers: RouterSettings | None
) -> None:
    policy = calls.double(
        "policy", backbone=SimpleNamespace(split=split), is_compiled=compiled, has_known_routers=has_routers
    )
    settings: Any = SimpleNamespace(aux_loss_coef=0.0)
    assert shared_parts.balanced_forward(settings, policy, calls.double("machine"), routers) is None


def test_samples_are_cut_by_tokens_where_they_are_packed() -> None:
    for packing in (True, False):
        expected = MicroBatching(max_sequences=3, max_tokens=70, by_tokens=packing)
        assert shared_parts.micro_batching(3, 70, packing) == expected


@pytest.mark.parametrize(("beams", "num_samples", "ranked"), [(0, 4, False), (3, 2, True)])
@pytest.mark.parametrize("prompts", [["a"], []])
def test_held_out_prompts_are_answered_as_evaluations_are_where_there_are_any(
    calls: Any, prompts: list[Any], beams: int, num_samples: int, ranked: bool
) -> None:
    calls.put(shared_parts, "Evaluator")
    # the constraint has fewer beams than are asked for
    engine = calls.double("engine", most_beams=2)
    reward, machine = (calls.double(name) for name in ("reward", "machine"))
    tokenizer, conversations = calls.double("tokenizer", eos_ids=(3,)), calls.double("conversations")
    data = calls.double("data", held_out=prompts, metrics=calls.double("metrics"))
    asked = SimpleNamespace(eval_n=4, eval_k="2", eval_pick="helpful", eval_temperature=0.5, eval_beams=beams)
    settings = calls.double("settings", evaluation=asked)
    named = {"answer_reader": lambda name: f"answers of {name}", "function_names": lambda settings: ["math"]}
    calls.replace(shared_parts, **named)
    found = shared_parts.make_evaluator(engine, tokenizer, reward, machine, data, 20, settings, conversations)
    assert (found is not None) is bool(prompts)
    drawn = shared_parts.SamplingOptions(temperature=0.5, max_new_tokens=20, stop_token_ids=(3,))
    made = [
        f"Evaluator(engine, tokenizer, reward, machine.collectives, ['a'], answer_of='answers of math', "
        f"conversations=conversations, first_answers={ranked}, ks=(2,), metrics=metrics, num_samples={num_samples}, "
        f"pick='helpful', ranked={ranked}, sampling={drawn!r})"
    ]
    assert calls.taken() == (made if prompts else [])


def test_a_ledger_is_of_its_data_and_seed(calls: Any) -> None:
    calls.put(shared_parts, "Ledger")
    orders: list[Any] = []
    mixture: Any = SimpleNamespace(sequence=lambda *given: (orders.append(given), [2, 1])[1])
    given: list[Any] = []
    calls.replace(shared_parts, Ledger=lambda *parts, **more: given.append((parts, more)))
    shared_parts.make_ledger(mixture, "hash", 12, 3, 5)
    [((rows, epochs, order), more)] = given
    assert (rows, epochs, more) == (12, 3, {"data_hash": "hash", "seed": 5})
    assert (order(1), orders) == ([2, 1], [(5, 1)])


@pytest.mark.parametrize(
    ("shape", "name", "more"),
    [
        ("constant", "constant", {}),
        ("cosine", "warmup_cosine", {"num_steps": 30, "floor_ratio": 0.25}),
        ("linear", "warmup_linear", {"num_steps": 30, "floor_ratio": 0.25}),
    ],
)
def test_a_schedule_has_the_numbers_of_its_settings(shape: Any, name: str, more: dict[str, Any]) -> None:
    settings = AdamSettings(lr_schedule=shape, lr_warmup_ratio=0.1, min_lr_ratio=0.25)
    schedule: Any = shared_parts.learning_rate_schedule(settings, 2.0, 30)
    assert schedule.func is getattr(learning_rate, name)
    assert schedule.keywords == {"peak": 2.0, "warmup_steps": 3} | more


@pytest.mark.parametrize(
    ("given", "updates", "warmup"), [(4, 30, 4), (0, 30, 0), (40, 30, 30), (5, 0, 5), (None, 30, 9)]
)
def test_a_warm_up_is_counted_in_steps_where_they_are_given(given: int | None, updates: int, warmup: int) -> None:
    settings = AdamSettings(lr_schedule="constant", lr_warmup_ratio=0.3, lr_warmup_steps=given)
    schedule: Any = shared_parts.learning_rate_schedule(settings, 2.0, updates)
    assert schedule.keywords["warmup_steps"] == warmup


def test_a_stable_rate_falls_in_its_share_of_all_steps() -> None:
    settings = AdamSettings(lr_schedule="wsd", lr_warmup_ratio=0.1, lr_decay_ratio=0.25, min_lr_ratio=0.5)
    schedule = shared_parts.learning_rate_schedule(settings, 2.0, 40)
    assert [schedule(step) for step in (4, 30, 35)] == [2.0, 2.0, 1.5]


@pytest.mark.parametrize(("coefficient", "rows"), [(0.5, True), (0.0, True), (0.5, False)])
def test_a_pretraining_term_has_rows_and_a_weight_and_visits_each_row_once_an_epoch(
    calls: Any, coefficient: float, rows: bool
) -> None:
    calls.put(shared_parts, "fused_policy PolicyLoss PretrainingLikelihood")
    samples = [TrainingSample(f"r:{n}", (1, 2), 1, 0.0) for n in range(6)]
    given = SimpleNamespace(samples=samples, mixture=Mixture([6]), num_rows=3)
    data: Any = SimpleNamespace(pretraining=given if rows else None)
    settings: Any = SimpleNamespace(pretraining=SimpleNamespace(ptx_coef=coefficient), run=SimpleNamespace(seed=7))
    found = shared_parts.pretraining_term(settings, data, calls.double("parallel"))
    if not (coefficient and rows):
        assert found is None
        return
    assert found is not None
    assert calls.taken() == [
        "PretrainingLikelihood(0.5)",
        "fused_policy(parallel)",
        "PolicyLoss(parallel.model, PretrainingLikelihood(), fused=fused_policy())",
    ]
    first = [sample.sample_id for number in (0, 1) for sample in found.rows.batch(number)]
    assert sorted(first) == [sample.sample_id for sample in samples]
    # not the order of the prompts, which may be rows of the same file
    assert first != [samples[int(n)].sample_id for n in Mixture([6]).order(7, 0)]
