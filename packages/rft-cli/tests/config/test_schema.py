"""The tables of settings: complete, described, and each default in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from rft.build.algorithm import algorithm_record
from rft.config.commands import load
from rft.config.refused_flags import REFUSED_FLAGS
from rft.config.schema import REQUIRED, schema
from rft.settings import EvalSettings, RlSettings, SftSettings
from rft_algos.algorithms.published import Grpo
from rft_cli.config.meanings import meanings
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import find_command, with_settings

NeededWords = Callable[..., list[str]]


GROUPS = [kind for command in with_settings() for kind in get_type_hints(load(find_command(command).settings)).values()]


@pytest.mark.parametrize("command", with_settings())
def test_flat_names_and_nested_settings_hold_the_same_values(command: str, needed_words: NeededWords) -> None:
    resolved = resolve(command, needed_words(command))
    for name, row in schema(command).items():
        group = getattr(resolved.settings, row.group)
        assert getattr(group, name) == resolved.values[name]


@pytest.mark.parametrize("command", with_settings())
def test_only_what_a_command_works_on_has_no_default(command: str) -> None:
    of_command = {"build": ["texts", "save_path"], "tokenizer": ["save_path"], "report": ["run"], **GENREC}
    of_command |= {key: [] for key in ("serve-reward", "pretrain", "doctor", "dashboard")}
    wanted = of_command.get(command, ["pretrain"])
    assert [name for name, row in schema(command).items() if row.default is REQUIRED] == wanted


GENREC = {
    **{key: ["catalogue"] for key in ("genrec-embed", "genrec-sid", "genrec-sft")},
    "genrec-data": ["source"],
    "genrec-eval": ["catalogue"],
    "genrec-recommend": ["catalogue", "pretrain"],
    "genrec-rl": ["pretrain", "catalogue"],
    "genrec-run": ["save_path"],
}


@pytest.mark.parametrize("kind", dict.fromkeys(GROUPS), ids=lambda kind: kind.__name__)
def test_every_setting_explains_itself(kind: type[Any]) -> None:
    for item in dataclasses.fields(kind):
        text = meanings(kind).get(item.name)
        assert text, f"{kind.__name__}.{item.name}"
        assert text.strip().endswith("."), f"{kind.__name__}.{item.name}"


@pytest.mark.parametrize("kind", dict.fromkeys(GROUPS), ids=lambda kind: kind.__name__)
def test_groups_are_frozen(kind: type[Any]) -> None:
    needed = [item.name for item in dataclasses.fields(kind) if item.default is dataclasses.MISSING]
    group = kind(**dict.fromkeys(needed, "model"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group, dataclasses.fields(kind)[0].name, "other")


def test_metadata_holds_only_what_is_read() -> None:
    known = {"minimum", "maximum", "above", "below", "bare", "aliases"}
    for command in with_settings():
        for row in schema(command).values():
            assert set(row.metadata) <= known, row.name


def test_defaults_are_those_of_the_documentation() -> None:
    rl = resolve("rl", ["--pretrain", "model"]).settings
    assert isinstance(rl, RlSettings)
    assert (rl.batch.rollout_batch_size, rl.batch.n_samples_per_prompt, rl.batch.train_batch_size) == (64, 8, 512)
    assert (rl.optimizer.actor_learning_rate, rl.optimizer.adam_betas, rl.optimizer.max_norm) == (
        1e-6,
        (0.9, 0.95),
        1.0,
    )
    assert rl.algorithm.advantage_estimator == "group_norm"
    assert algorithm_record(rl) == Grpo(), "what is left out is that of the published algorithm"
    assert (rl.checkpoint.save_steps, rl.checkpoint.save_interval, rl.checkpoint.max_ckpt_num) == (-1, 1, 3)
    assert (rl.run.seed, rl.run.max_unscored_share, rl.run.max_refused_steps) == (42, 0.1, 3)


def test_evaluation_is_greedy_and_training_is_not() -> None:
    assert EvalSettings.__dataclass_fields__["sampling"].default_factory().temperature == 0.0  # type: ignore[misc]
    assert resolve("rl", ["--pretrain", "m"]).settings.sampling.temperature == 1.0


def test_supervised_training_has_its_own_learning_rate() -> None:
    sft = resolve("sft", ["--pretrain", "m", "--learning_rate", "3e-4"]).settings
    assert isinstance(sft, SftSettings)
    assert sft.training.learning_rate == 3e-4
    assert "actor_learning_rate" not in schema("sft")


def test_no_name_is_both_a_setting_and_refused() -> None:
    accepted = {name for command in with_settings() for name in schema(command)}
    # a new model has one to choose, of others it is that of their directory; recommendation has its own
    assert accepted & set(REFUSED_FLAGS) == {
        "tokenizer",
        *("max_tokens", "template", "sid_index_path", "item_meta_path"),
    }


def test_all_groups_of_a_command_are_in_its_module() -> None:
    assert {name for name in with_settings() if not name.startswith("genrec-")} == {
        *("rl", "sft", "dpo", "rm", "rm-test", "eval", "serve-reward", "generate", "conformance", "build", "pretrain"),
        *("perplexity", "tokenizer", "doctor", "report", "dashboard"),
    }
