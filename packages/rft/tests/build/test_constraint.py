"""The constraint of a command: a tree of a task's sequences, or the reason why there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build.constraint import constraint_of, group_advantages, policy_within, rollout_engine, within
from rft.settings import EvalSettings, RlSettings
from rft_core.errors import RftError
from rft_engine.settings import DecodingEngineSettings, SamplingSettings, TrainingSamplingSettings
from rft_models.settings import ModelSettings, WeightsSettings
from rft_trainer.rollouts.constrained import BeamEngine, ConstrainedEngine, RenormalisedEngine
from rft_trainer.scoring.constrained_policy import ConstrainedPolicy

SOURCE = """
from rft_trainer.installed_tasks.record import InstalledTask
DIGITS = InstalledTask(name="digits", constraint="a_constraint:digits")
WORDS = InstalledTask(name="words", rows="a_constraint:digits")
def digits(tokenizer, argument):
    kinds = {"text": ["3"], "empty": [[]], "none": [], "same": [[1], [1]], "": [[1, 0], [2, 2, 0]]}
    return kinds[argument]
"""
TOKENIZER: Any = object()


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two tasks of one package, of which one has a constraint."""
    (tmp_path / "a_constraint.py").write_text(SOURCE)
    facts = tmp_path / "a_constraint-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: a-constraint\nVersion: 1.0\n")
    rows = "digits = a_constraint:DIGITS\nwords = a_constraint:WORDS\n"
    (facts / "entry_points.txt").write_text(f"[rft.tasks]\n{rows}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("a_constraint", None)


def rl(constraint: str = "digits", **groups: Any) -> RlSettings:
    sampling = TrainingSamplingSettings(constraint=constraint, generate_max_len=4)
    return RlSettings(model=ModelSettings(pretrain="m", device="cpu"), sampling=sampling, **groups)


def with_setting(group: str, **values: Any) -> RlSettings:
    settings = rl()
    return replace(settings, **{group: replace(getattr(settings, group), **values)})


def test_a_command_without_one_has_no_tree_and_its_own_engine() -> None:
    assert constraint_of(rl(""), TOKENIZER) is None
    engine = object()
    assert within(engine, None) is engine


def test_the_sequences_of_a_task_are_the_tree() -> None:
    evaluated = EvalSettings(
        model=WeightsSettings(pretrain="m", device="cpu"),
        sampling=SamplingSettings(constraint="digits"),
        engine=DecodingEngineSettings(),
    )
    for settings in (rl(), evaluated):
        trie = constraint_of(settings, TOKENIZER)
        assert trie is not None
        assert (trie.num_sequences, trie.depth, trie.shortest) == (2, 3, 2)
        assert type(within(object(), trie)) is ConstrainedEngine


@pytest.mark.parametrize(
    ("constraint", "code", "part"),
    [
        ("letters", "task.unknown", "no task letters"),
        ("words", "task.no_part", "no constraint"),
        ("digits:text", "task.constraint", "sequence 1"),
        ("digits:empty", "task.constraint", "sequence 1"),
        ("digits:none", "task.constraint", "gave nothing"),
        ("digits:other", "task.constraint", "KeyError: 'other'"),
    ],
)
def test_what_makes_no_tree_is_refused(constraint: str, code: str, part: str) -> None:
    with pytest.raises(RftError) as caught:
        constraint_of(rl(constraint), TOKENIZER)
    assert caught.value.problem.code == code
    assert part in caught.value.problem.what


@pytest.mark.parametrize(
    ("settings", "code", "do"),
    [
        (with_setting("conversation", environment="calculator"), "constraint.unsupported", "leave --environment out"),
        (with_setting("sampling", generate_max_len=2), "constraint.too_long", "--generate_max_len 3"),
    ],
    ids=["async", "environment", "length"],
)
def test_rollouts_that_take_no_tree_are_refused(settings: RlSettings, code: str, do: str) -> None:
    with pytest.raises(RftError) as caught:
        constraint_of(settings, TOKENIZER)
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)


def test_an_engine_without_the_capability_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rft.build import constraint

    class Chosen:
        name = "plain"

        class can:
            supports_constraint = False

    monkeypatch.setattr(constraint, "choose_engine", lambda *_: Chosen())
    with pytest.raises(RftError) as caught:
        constraint_of(rl(), TOKENIZER)
    assert (caught.value.problem.code, caught.value.problem.do) == ("constraint.unsupported", "--engine_type native")


def with_sampling(**values: Any) -> RlSettings:
    settings = rl("digits:")
    return replace(settings, sampling=replace(settings.sampling, **values))


def test_what_is_drawn_and_scored_follows_from_the_settings() -> None:
    engine, policy = object(), object()
    trie = constraint_of(rl("digits:"), TOKENIZER)
    assert isinstance(rollout_engine(engine, trie, with_sampling()), RenormalisedEngine)
    assert isinstance(rollout_engine(engine, trie, with_sampling(constraint_logprobs="vocabulary")), ConstrainedEngine)
    beams = with_sampling(constraint_logprobs="vocabulary", group_source="beams")
    assert isinstance(rollout_engine(engine, trie, beams), BeamEngine)
    assert rollout_engine(engine, None, rl("")) is engine
    assert isinstance(policy_within(policy, trie, with_sampling()), ConstrainedPolicy)
    assert policy_within(policy, trie, with_sampling(constraint_logprobs="vocabulary")) is policy
    assert policy_within(policy, None, rl("")) is policy


def test_weighted_beams_have_advantages_of_their_own() -> None:
    assert group_advantages(with_sampling()) is group_advantages(with_sampling(group_source="beams")) is None
    compute = group_advantages(with_sampling(group_source="weighted_beams"))
    assert compute is not None
    batch: Any = SimpleNamespace(
        rewards_N=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group_ids_N=torch.zeros(2, dtype=torch.int64),
        segment_ids_T=torch.tensor([0, 0, 1]),
        behaviour_logprobs_T=torch.tensor([0.6, 1.0, 0.2], dtype=torch.float64).log(),
    )
    # weights 3/4 and 1/4, as in `probability_weighted`
    assert compute(batch).tolist() == pytest.approx([0.375, -0.375])


def test_groups_of_more_beams_than_sequences_are_refused() -> None:
    settings = with_sampling(group_source="beams")
    settings = replace(settings, batch=replace(settings.batch, n_samples_per_prompt=3))
    with pytest.raises(RftError, match="groups of 3 beams") as caught:
        constraint_of(settings, TOKENIZER)
    assert caught.value.problem.do == "--n_samples_per_prompt 2"


@pytest.mark.parametrize(
    ("group", "values", "what"),
    [
        ("engine", {"engine_type": "hf"}, "has no beam search"),
        ("engine", {"engine_max_rows": 1}, "engine_max_rows = 1"),
        ("replicas", {"engine_replicas": 2}, "engine_replicas = 2"),
    ],
)
def test_engines_that_search_for_no_beams_are_refused_by_name(group: str, values: dict[str, Any], what: str) -> None:
    settings = with_sampling(group_source="beams")
    settings = replace(settings, batch=replace(settings.batch, n_samples_per_prompt=2))
    settings = replace(settings, **{group: replace(getattr(settings, group), **values)})
    with pytest.raises(RftError, match=what) as caught:
        constraint_of(settings, TOKENIZER)
    assert caught.value.problem.code == "constraint.unsupported"
