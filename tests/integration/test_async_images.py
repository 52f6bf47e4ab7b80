"""Images with replicas and ahead of the trainer: the tokens of the engine in the process, also through a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.compare import differences
from support.references import KILLED
from support.runs import ForkServer
from support.vision_task import VisionTask, make_vision_task

pytestmark = pytest.mark.xdist_group("vision")
LOGGED = ("--rollout_log_interval", "1", "--num_trajectories_to_save", "64")
AHEAD = (*LOGGED, "--max_staleness", "1", "--async_deterministic", "--max_steps", "4", "--save_steps", "2")


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "images")


def words(images: VisionTask, run: Path, *more: str, data: Path | None = None) -> list[str]:
    """A run in this directory."""
    return ["rl", *images.rl_words(*more, data=data), "--save_path", str(run)]


def drawn(run: Path) -> list[list[tuple[Any, ...]]]:
    """What was trained, by step."""
    keys = ("prompt_id", "sample", "response", "reward")
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [[tuple(json.loads(line)[key] for key in keys) for line in file.read_text().splitlines()] for file in files]


def test_two_replicas_draw_after_images_what_the_engine_in_the_process_draws(
    server: ForkServer, images: VisionTask, runs: Path
) -> None:
    mixed = {"data": images.mixed}
    mm = ("--mixed_mm_data", *LOGGED)
    server.must_finish(*words(images, runs / "one", *mm, **mixed))
    server.must_finish(*words(images, runs / "two", *mm, "--engine_replicas", "2", **mixed))
    assert drawn(runs / "one") == drawn(runs / "two")
    assert sum(map(len, drawn(runs / "one"))) == 32


@pytest.mark.night
def test_a_run_with_images_ahead_is_killed_and_goes_on_to_the_run_that_was_not(
    server: ForkServer, images: VisionTask, runs: Path
) -> None:
    given = (*AHEAD, "--eval_data", str(images.held_out))
    server.must_finish(*words(images, runs / "whole", *given))
    killed = server.run(*words(images, runs / "run", *given), preludes=[("signal_at", ["rl.updated", 4, "SIGKILL"])])
    assert killed.code == KILLED, killed.output[-3000:]
    server.must_finish("resume", str(runs / "run"))
    told = differences(runs / "whole", runs / "run")
    # a run that was started without a recipe is called after its config.yaml once it is resumed
    assert [line for line in told if not line.startswith("summary.json")] == []


@pytest.mark.night
def test_samples_go_on_after_their_images_under_new_weights(server: ForkServer, images: VisionTask, runs: Path) -> None:
    free = ("--max_staleness", "1", "--engine_replicas", "2", "--max_steps", "0", "--num_episodes", "1")
    free = (*free, "--save_steps", "2", "--generate_max_len", "12")
    run = runs / "run"
    killed = server.run(*words(images, run, *free), preludes=[("signal_at", ["rl.logged", 5, "SIGKILL"])])
    assert killed.code == KILLED, killed.output[-3000:]
    server.must_finish("resume", str(run))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["data/prompts"] for row in rows) == 32
    assert all(row["async/staleness_max"] <= 1 for row in rows)
