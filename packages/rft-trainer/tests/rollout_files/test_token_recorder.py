"""What is recorded of a step: which answers, what is known of each token, and how much is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.rollout_files.token_recorder import RecordLimits, TokenRecorder
from rft_trainer.rollout_files.token_records import read_token_records, token_file, token_files
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import rollouts_due
from rft_trainer.scoring.samples import flat_rollouts, sample_name


class Scorer:
    """Log-probs that name their place, and the groups that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def with_entropies(self, groups: Sequence[RolloutGroup]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        flat = [one for _, one in flat_rollouts(groups)]
        self.asked.append([f"{one.prompt_id}#{one.sample_index}" for one in flat])
        return [(-2.0,) * len(one.completion_ids) for one in flat], [(0.5,) * len(one.completion_ids) for one in flat]


def rollout(prompt: str, index: int, length: int = 2, **more: Any) -> Rollout:
    given: dict[str, Any] = {"reward": float(index), "status": RewardStatus.OK, **more}
    return Rollout(
        prompt, index, tuple(range(5, 5 + length)), (-1.0,) * length, (0.0,) * length, "stop", 3, "", **given
    )


def group(number: int, *rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(Prompt(f"p{number}", (1, 2), "", None, "s"), 0, number, rollouts)


def sample(of: RolloutGroup, one: Rollout, **more: Any) -> TrainingSample:
    ids = of.prompt.token_ids + one.completion_ids
    return TrainingSample(sample_name(of, one), ids, len(of.prompt.token_ids), **more)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config_text="seed: 1\n", command=["x"], environment={})


def recorder(directory: RunDirectory, scorer: Scorer, *, writes: bool = True, **more: Any) -> TokenRecorder:
    limits: dict[str, Any] = {
        "is_due": partial(rollouts_due, every=10),
        "num_responses": None,
        "max_bytes": 1 << 30,
        **more,
    }
    return TokenRecorder(directory, scorer, RecordLimits(**limits), writes=writes)


def test_what_is_known_of_each_token_is_recorded(directory: RunDirectory) -> None:
    scorer = Scorer()
    made = recorder(directory, scorer)
    groups = [group(0, rollout("p0", 0), rollout("p0", 1, 3)), group(1, rollout("p1", 0, reward=None))]
    made.score(1, groups)
    trained, of = groups[0].rollouts, groups[0]
    made.credit(
        [
            sample(of, trained[0], advantage=-0.5),
            sample(of, trained[1], advantage=0.0, token_advantages=(0.1, 0.2, 0.3), reference_logprobs=(-3.0,) * 3),
        ]
    )
    made.write()
    first, second, third = read_token_records(token_file(directory.rollouts_directory, 1))
    assert (first.prompt_ids, first.token_ids, first.versions, first.mask) == ((1, 2), (5, 6), (3, 3), (True, True))
    assert (first.engine_logprobs, first.trainer_logprobs, first.entropies) == ((-1.0,) * 2, (-2.0,) * 2, (0.5,) * 2)
    assert (first.advantages, first.reference_logprobs) == ((-0.5, -0.5), None)
    assert second.advantages == pytest.approx((0.1, 0.2, 0.3))
    assert second.reference_logprobs == (-3.0,) * 3
    # left out of the step, and recorded all the same
    assert (third.prompt_id, third.reward, third.advantages) == ("p1", None, None)
    assert third.trainer_logprobs == (-2.0, -2.0)


def test_only_steps_that_are_due_are_scored_and_written(directory: RunDirectory) -> None:
    scorer = Scorer()
    made = recorder(directory, scorer)
    for step in range(1, 12):
        made.score(step, [group(0, rollout("p0", 0))])
        made.credit([])
        made.write()
    assert len(scorer.asked) == 2
    assert list(token_files(directory.rollouts_directory)) == [1, 10]


def test_as_few_whole_groups_as_have_so_many_answers(directory: RunDirectory) -> None:
    scorer = Scorer()
    made = recorder(directory, scorer, num_responses=3)
    made.score(10, [group(n, rollout(f"p{n}", 0), rollout(f"p{n}", 1)) for n in range(4)])
    made.write()
    assert scorer.asked == [["p0#0", "p0#1", "p2#0", "p2#1"]]
    assert len(read_token_records(token_file(directory.rollouts_directory, 10))) == 4


def test_a_rank_that_does_not_write_scores_too(directory: RunDirectory) -> None:
    scorer = Scorer()
    made = recorder(directory, scorer, writes=False)
    made.score(1, [group(0, rollout("p0", 0))])
    made.write()
    assert len(scorer.asked) == 1
    assert not token_files(directory.rollouts_directory)


def test_an_answer_without_tokens_is_not_scored(directory: RunDirectory) -> None:
    scorer = Scorer()
    made = recorder(directory, scorer)
    made.score(1, [group(0, rollout("p0", 0, 0, reward=None)), group(1, rollout("p1", 0))])
    made.write()
    assert scorer.asked == [["p1#0"]]
    assert read_token_records(token_file(directory.rollouts_directory, 1))[0].trainer_logprobs == ()


def test_versions_of_a_conversation_follow_its_sampled_tokens(directory: RunDirectory) -> None:
    turns = (Turn(True, 2, "a"), Turn(False, 1, "b"), Turn(True, 1, "c"))
    talk = rollout("p0", 0, 4, turns=turns, version_spans=((3, 2), (4, 1)))
    made = recorder(directory, Scorer())
    made.score(1, [group(0, talk)])
    made.write()
    [record] = read_token_records(token_file(directory.rollouts_directory, 1))
    assert record.mask == (True, True, False, True)
    assert record.versions == (3, 3, 3, 4)


def test_the_oldest_files_go_beyond_the_limit_and_the_newest_stays(directory: RunDirectory) -> None:
    folder = directory.rollouts_directory
    for max_bytes, kept in ((1 << 20, [10, 20, 30]), (0, [40])):
        made = recorder(directory, Scorer(), max_bytes=max_bytes)
        for step in (10, 20, 30) if max_bytes else (40,):
            made.score(step, [group(0, rollout("p0", 0))])
            made.write()
        assert list(token_files(folder)) == kept


def test_a_resume_cuts_the_files_of_later_steps(directory: RunDirectory) -> None:
    made = recorder(directory, Scorer())
    for step in (10, 20):
        made.score(step, [group(0, rollout("p0", 0))])
        made.write()
    directory.cut_after(15)
    assert list(token_files(directory.rollouts_directory)) == [10]
