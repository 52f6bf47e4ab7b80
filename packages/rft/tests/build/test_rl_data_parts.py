"""Data of an RL run: what rows are read with, the room of responses, and the numbers of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import rl_data
from rft.settings import RlSettings
from rft_core.errors import DataError, OptionsError
from rft_engine.settings import TrainingSamplingSettings
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_trainer.batches.batch_plan import BatchSizes
from rft_trainer.loops.rl import StepConfig
from rft_trainer.settings.algorithm import AlgorithmSettings
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.critic import CriticSettings
from rft_trainer.settings.data import DataSettings
from rft_trainer.settings.evaluation import EvaluationSettings
from rft_trainer.settings.pretraining import PretrainingSettings
from rft_trainer.settings.rollouts import AsyncSettings
from rft_trainer.settings.run import RlRunSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="m", device="cpu"))


@pytest.mark.parametrize(
    ("max_len", "positions", "longest", "limits"),
    [(None, 100, 12, (20, 32)), (45, 100, 12, (15, 27)), (90, 100, 12, (20, 32)), (None, 32, 12, (20, 32))],
)
def test_a_response_has_the_room_of_the_longest_prompt_that_is_allowed(
    calls: Any, max_len: int | None, positions: int, longest: int, limits: tuple[int, int]
) -> None:
    calls.put(rl_data, model_facts=SimpleNamespace(max_positions=positions))
    sampling = TrainingSamplingSettings(prompt_max_len=30, generate_max_len=20, max_len=max_len)
    assert rl_data.response_limits(replace(PLAIN, sampling=sampling), longest) == limits
    assert calls.taken() == ["model_facts('m')"]


@pytest.mark.parametrize(
    ("longest", "do"),
    [
        (12, "--generate_max_len 19"),
        (30, "--generate_max_len 1"),
        (31, "--prompt_max_len 15"),
        (99, "--prompt_max_len 15"),
    ],
)
def test_a_response_that_the_model_cannot_place_is_refused(calls: Any, longest: int, do: str) -> None:
    calls.put(rl_data, model_facts=SimpleNamespace(max_positions=31))
    settings = replace(PLAIN, sampling=TrainingSamplingSettings(generate_max_len=20))
    with pytest.raises(OptionsError) as caught:
        rl_data.response_limits(settings, longest)
    assert (caught.value.problem.code, caught.value.problem.do) == ("length.beyond_model", do)


@pytest.fixture(autouse=True)
def no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows here are no texts, of which anything could be noted."""
    monkeypatch.setattr(rl_data, "data_notes", lambda *_, **__: ())


def prompts(*lengths: int) -> list[Any]:
    return [SimpleNamespace(token_ids=(0,) * length) for length in lengths]


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("held_out", [True, False])
def test_rows_are_read_with_the_settings_that_name_them(calls: Any, values: bool, held_out: bool) -> None:
    advantage = SimpleNamespace(needs_values=values, compares_groups=True)
    loaded = SimpleNamespace(unused=())
    training = SimpleNamespace(prompts=lambda: prompts(3, 5), rendered=(), loaded=loaded, mixture=1, data_hash=2)
    plan = SimpleNamespace(
        rollouts_per_episode=7, rollouts_per_update=2, total_steps=70, collection_size=16, cut=lambda size: [1] * 4
    )
    calls.put(
        rl_data,
        "refuse_beside_images",
        algorithm_record=SimpleNamespace(advantage=advantage),
        row_images="images",
        wants_store=False,
        read_training=training,
        read_held_out="rendered",
        as_prompts=prompts(9, 2),
        run_dims=SimpleNamespace(dp_size=6),
        plan_batches=plan,
    )
    chosen = DataSettings(
        prompt_data="t", eval_data="e" if held_out else "", eval_split="s", max_eval_samples=8, label_key="l"
    )
    batch = BatchSettings(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=3,
        micro_rollout_batch_size=5,
        max_epochs=2,
        num_episodes=3,
        max_steps=10,
    )
    settings = replace(
        PLAIN,
        data=chosen,
        batch=batch,
        critic=CriticSettings(critic_pretrain="c"),
        sampling=TrainingSamplingSettings(prompt_max_len=30),
        run=RlRunSettings(seed=5),
    )
    found = rl_data.rl_data(settings, calls.double("tokenizer"), 12)
    read = "images='images', label_key='l', output_key=None, prompt_max_len=30, whole_rows=False)"
    sizes = BatchSizes(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=3,
        micro_rollout_batch_size=5,
        max_epochs=2,
        num_episodes=3,
        world_size=6,
        group_estimator=True,
    )
    assert calls.taken() == [
        f"algorithm_record({settings!r})",
        f"refuse_beside_images({settings.images!r}, {settings.strategy!r}, {settings.model!r}, tokenizer, "
        f"critic={'c' if values else ''!r})",
        f"row_images({settings.images!r}, 5)",
        f"wants_store({chosen!r}, tokenizer, images_key='', reason='')",
        f"read_training({chosen!r}, {chosen!r}, tokenizer, {read}",
        *([f"read_held_out('e', 's', 8, {chosen!r}, tokenizer, {read}", "as_prompts('rendered')"] if held_out else []),
        f"run_dims({settings.strategy!r}, 12)",
        f"plan_batches(2, {sizes!r})",
    ]
    # four steps an episode, cut by max_steps; each of its steps has four updates and two epochs
    assert (found.num_steps, found.num_updates) == (10, 70)
    assert found.longest_prompt == (9 if held_out else 5)
    assert (found.training, found.plan, len(found.held_out)) == (training, plan, 2 if held_out else 0)
    for max_steps, counts in ((0, (12, 70)), (12, (12, 70)), (13, (12, 70)), (3, (3, 24))):
        cut = replace(settings, batch=replace(batch, max_steps=max_steps))
        found = rl_data.rl_data(cut, calls.double("tokenizer"), 12)
        assert (found.num_steps, found.num_updates) == counts


RULES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({}, {"has_other_terms": True}, {"skip_zero_advantage": False}),
    ({"model": ModelSettings(pretrain="m", aux_loss_coef=0.5)}, {}, {"skip_zero_advantage": False}),
    ({"algorithm": AlgorithmSettings(filter_groups=True)}, {}, {"filter_groups": True}),
    (
        {"algorithm": AlgorithmSettings(dynamic_sampling_rounds=6)},
        {"dynamic_sampling": True},
        {"filter_groups": True, "refill_rounds": 6},
    ),
    ({}, {"compares_groups": False}, {"smallest_group": 1}),
    ({}, {"needs_greedy": True}, {"needs_baseline": True}),
    ({"critic": CriticSettings(freezing_actor_steps=4)}, {"needs_values": True}, {"frozen_steps": 4}),
    ({"critic": CriticSettings(freezing_actor_steps=-1)}, {"needs_values": True}, {"frozen_steps": 0}),
    ({"critic": CriticSettings(freezing_actor_steps=4)}, {}, {}),
    ({"evaluation": EvaluationSettings(eval_steps=-1)}, {}, {"eval_every": 4}),
    ({"evaluation": EvaluationSettings(eval_steps=0)}, {}, {"eval_every": 0}),
    ({"evaluation": EvaluationSettings(eval_steps=9)}, {}, {"eval_every": 9}),
    ({"async_rollouts": AsyncSettings(max_staleness=3)}, {}, {"max_staleness": 3}),
]


@pytest.mark.parametrize(("groups", "algorithm", "changes"), RULES)
def test_a_step_has_the_rules_of_settings_and_algorithm(
    groups: dict[str, Any], algorithm: dict[str, Any], changes: dict[str, Any]
) -> None:
    batch = BatchSettings(rollout_batch_size=4, train_batch_size=8, max_epochs=2, max_steps=10)
    run = RlRunSettings(max_refused_steps=7, max_unscored_share=0.25)
    evaluation = EvaluationSettings(eval_steps=5)
    settings = replace(PLAIN, **{"batch": batch, "run": run, "evaluation": evaluation} | groups)
    has = {"compares_groups": True, "needs_greedy": False, "needs_values": False} | algorithm
    record: Any = SimpleNamespace(
        has_other_terms=algorithm.get("has_other_terms", False),
        dynamic_sampling=algorithm.get("dynamic_sampling", False),
        advantage=SimpleNamespace(**has),
    )
    data: Any = SimpleNamespace(plan=SimpleNamespace(rollouts_per_update=2, rollouts_per_episode=7))
    usual: dict[str, Any] = {
        "prompts_per_rollout": 4,
        "rollouts_per_step": 2,
        "train_batch_size": 8,
        "epochs_per_step": 2,
        "skip_zero_advantage": True,
        "filter_groups": False,
        "refill_rounds": 0,
        "smallest_group": 2,
        "needs_baseline": False,
        "frozen_steps": 0,
        "max_steps": 10,
        "eval_every": 5,
        "max_refused_in_a_row": 7,
        "max_unscored_share": 0.25,
        "max_staleness": 0,
    }
    assert rl_data.step_rules(settings, data, record) == StepConfig(**usual | changes)


def pretraining(folder: Path, rows: list[dict[str, str]], **chosen: Any) -> rl_data.PretrainingData | None:
    model = build_character_model(folder / "m", hidden=8, layers=1, heads=1, kv_heads=1, ffn=8, max_positions=24)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = replace(
        PLAIN,
        model=ModelSettings(pretrain=str(model), device="cpu"),
        batch=BatchSettings(train_batch_size=3),
        sampling=TrainingSamplingSettings(prompt_max_len=8, generate_max_len=4),
        pretraining=PretrainingSettings(pretrain_data=str(folder / "rows.jsonl"), **chosen),
    )
    return rl_data.pretraining_data(settings, load_tokenizer(model))


def test_demonstrations_beside_the_rewards_are_whole_or_left_out_by_name(tmp_path: Path) -> None:
    rows = [{"input": f"{n}+{n}=", "output": str(2 * n)} for n in range(5)]
    found = pretraining(tmp_path, [*rows, {"input": "1+1=", "output": "2" * 20}])
    assert found is not None
    assert (len(found.samples), found.num_rows) == (5, 3)
    assert {sample.prompt_length for sample in found.samples} == {4}
    assert found.left_out == [("rows:5", 25)]
    assert found.line(0.5).startswith("pre-training: 0.5 x mean loss of 3 rows an update, of 5 with 10 tokens; 1 rows")


def test_of_texts_every_token_is_learned(tmp_path: Path) -> None:
    found = pretraining(tmp_path, [{"text": "1+1=2"}, {"text": "2"}], pretrain_text_key="text")
    assert found is not None
    assert [(sample.prompt_length, sample.num_loss_tokens) for sample in found.samples] == [(0, 5), (0, 1)]
    assert found.num_rows == 2


@pytest.mark.parametrize(
    ("row", "chosen", "flag"),
    [
        ({"input": "1+1=", "label": "2"}, {}, "--pretrain_output_key"),
        ({"x": "1+1=", "output": "2"}, {}, "--pretrain_input_key"),
        ({"x": "1+1="}, {"pretrain_text_key": "text"}, "--pretrain_text_key"),
    ],
)
def test_a_column_that_is_missing_is_told_by_the_flag_of_these_rows(
    row: dict[str, str], chosen: dict[str, str], flag: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        pretraining(tmp_path, [row], **chosen)
    assert flag in caught.value.problem.why


def test_without_rows_nothing_is_read() -> None:
    nothing: Any = None
    assert rl_data.pretraining_data(PLAIN, nothing) is None
