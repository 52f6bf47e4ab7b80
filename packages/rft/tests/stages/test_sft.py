"""A supervised run from its settings: which rows it trains on, what each part is given, and the order of its start."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import sft
from rft_trainer.loops.sft import SftLoop


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
        "check_routers refuse_beside_images",
        row_images="images",
        held_out_text="text",
        read_training=training,
        read_held_out=(),
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
        "check_routers(settings.model, settings.routers)",
        "refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer)",
        "row_images(settings.images, settings.run.seed)",
        "trained_turns(data)",
        "wants_store(data, tokenizer, images_key=settings.images.images_key)",
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
        "demonstrations((), tokenizer, 77)",
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


@pytest.mark.parametrize(("sources", "sets"), [(["a", "a"], ()), (["a", "b"], ("b", "a"))])
def test_several_held_out_sets_are_told_apart(read: Any, sources: list[str], sets: tuple[str, ...]) -> None:
    rows = [SimpleNamespace(prompt_id=f"s{number}", source=source) for number, source in enumerate(sources)]
    samples = [SimpleNamespace(sample_id=f"s{number}", num_loss_tokens=number) for number in (1, 0)]
    read.put(sft, read_held_out=rows, demonstrations=(samples, []))
    given = settings_of(read, eval_data="a.jsonl,b.jsonl")
    assert sft.sft_data(given, read.double("tokenizer"), 77).held_out_sets == sets


@pytest.mark.parametrize(
    ("batch", "epochs", "most", "steps"),
    [(4, 3, 0, 6), (3, 3, 0, 6), (6, 1, 0, 1), (5, 1, 0, 2), (4, 3, 5, 5), (4, 3, 9, 6)],
)
def test_a_last_batch_that_is_not_full_is_a_step(read: Any, batch: int, epochs: int, most: int, steps: int) -> None:
    given = settings_of(read, train_batch_size=batch, max_epochs=epochs, max_steps=most)
    assert sft.sft_data(given, read.double("tokenizer"), 77).num_steps == steps


PARTS = "counting balanced_forward fused_policy PolicyLoss SupervisedLoss TokenLikelihood"


def built(calls: Any, **chosen: Any) -> tuple[list[str], dict[str, Any]]:
    """The calls of a build, and what the loop is given."""
    parallel = calls.double("parallel", model=calls.double("model"))
    state = calls.double("state", parallel=parallel, loop_parts=lambda *given: {"common": given})
    calls.put(sft, PARTS, policy_state=state)
    none: dict[str, Any] = {"label_smoothing": 0.0, "z_loss_coef": 0.0, "neftune_noise_alpha": 0.0}
    settings = calls.double("settings", training=calls.double("training", **none | chosen))
    started = calls.double("started", machine=calls.double("machine"))
    data = calls.double("data", samples=["a", "b", "c"], mixture="mixture", data_hash="hash", num_steps=7)
    given: dict[str, Any] = {}

    def loop(**parts: Any) -> str:
        given.update(parts)
        return "loop"

    calls.replace(sft, SftLoop=loop)
    assert sft.build_sft(settings, started, calls.double("tokenizer"), data) == "loop"
    return calls.taken(), given


def test_the_loop_has_the_likelihood_of_its_rows_as_its_loss(calls: Any) -> None:
    made, given = built(calls)
    assert made == [
        "policy_state(settings, started, tokenizer, "
        "RowOrder(mixture='mixture', data_hash='hash', num_rows=3, num_steps=7))",
        "state.progress.passed(7)",
        "TokenLikelihood()",
        "balanced_forward(settings.model, model, machine, settings.routers, state.progress.passed())",
        "fused_policy(parallel)",
        "PolicyLoss(model, TokenLikelihood(), balanced=balanced_forward(), fused=fused_policy())",
        "model.key_dropout(settings.run.seed)",
        "state.learning_rates()",
        "counting(model, state.learning_rates())",
    ]
    assert given == {
        "common": ("PolicyLoss()", "counting()"),
        "samples": ["a", "b", "c"],
        "held_out": "data.held_out",
        "held_out_sets": "data.held_out_sets",
        "policy": "model",
        "data_ranks": "parallel.data",
        "collective_forward": "parallel.collective_forward",
        "eval_max_sequences": "training.micro_train_batch_size",
        "eval_max_tokens": "training.max_tokens_per_micro_batch",
        "device": "machine.device",
    }
    assert set(given) - {"common"} <= {field.name for field in fields(SftLoop)}


def test_terms_over_the_vocabulary_take_a_loss_of_their_own(calls: Any) -> None:
    made, given = built(calls, label_smoothing=0.1, z_loss_coef=0.2)
    assert not [call for call in made if call.startswith(("PolicyLoss", "TokenLikelihood", "fused_policy"))]
    [loss] = [call for call in made if call.startswith("SupervisedLoss")]
    assert loss.startswith("SupervisedLoss(model, Sft(")
    assert "label_smoothing=0.1, z_loss_coef=0.2" in loss
    assert given["common"] == ("SupervisedLoss()", "counting()")


def test_noise_is_keyed_by_the_seed_and_begins_anew_with_each_update() -> None:
    policy: Any = SimpleNamespace(backbone=SimpleNamespace(noise=None))
    assert sft.with_noise(policy, float, alpha=0.0, seed=1) is float
    assert policy.backbone.noise is None
    rate = sft.with_noise(policy, lambda update: update / 10, alpha=5.0, seed=1)
    assert (rate(7), policy.backbone.noise.update, policy.backbone.noise.alpha) == (0.7, 7, 5.0)


def test_rows_are_read_by_a_tokenizer_and_the_loop_is_built_from_what_was_read(calls: Any) -> None:
    calls.put(sft, tokenizer_with_images="tokenizer", sft_data=calls.double("data"), sft_contents="contents")
    calls.put(sft, "model_facts build_sft")
    resolved = calls.double("resolved", settings=calls.double("settings"))
    found = sft.read_sft(resolved)
    assert (str(found.data), found.num_steps, found.contents) == ("data", "data.num_steps", "contents")
    assert found.build("started") == "build_sft()"  # type: ignore[arg-type]
    assert calls.taken() == [
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "sft_data(settings, 'tokenizer', model_facts().max_positions)",
        "sft_contents(resolved, data)",
        "build_sft(settings, 'started', 'tokenizer', data)",
    ]
