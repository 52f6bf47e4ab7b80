"""Reward models of pairs about images: trained, resumed, tested, and used on prompts with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import differences, final_checkpoint, read_rows
from support.references import KILLED
from support.runs import ForkServer
from support.vision_task import VisionTask, make_vision_task

pytestmark = pytest.mark.xdist_group("image_runs")

SHORT = ("--max_steps", "3", "--train_batch_size", "4", "--micro_train_batch_size", "2", "--learning_rate", "1e-3")
SHORT = (*SHORT, "--save_steps", "1", "--save_interval", "0", "--eval_steps", "2", "--max_pixels", "256")


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "reward_images")


def words(images: VisionTask, run: Path, *more: str) -> list[str]:
    (images.root / "rm.yaml").write_text("recipe: {command: rm}\n")
    given = ["rm", "--config", str(images.root / "rm.yaml"), "--pretrain", str(images.model)]
    given += ["--prompt_data", str(images.train), "--eval_data", str(images.held_out), "--images_key", "image"]
    return [*given, "--device", "cpu", "--save_path", str(run), *SHORT, *more]


def test_a_killed_run_goes_on_to_the_bit_and_its_model_scores_what_a_policy_sees(
    server: ForkServer, images: VisionTask, runs: Path
) -> None:
    server.must_finish(*words(images, runs / "one"))
    kill = [("signal_at", ["rm.logged", 2, "SIGKILL"])]
    assert server.run(*words(images, runs / "run"), preludes=kill).code == KILLED
    server.must_finish("resume", str(runs / "run"))
    assert differences(runs / "one", runs / "run") == []
    server.must_finish(*words(images, runs / "others", "--shuffle_images"))
    first, other = (read_rows(runs / name / "metrics.jsonl")[1] for name in ("one", "others"))
    assert first["rm/chosen"] != other["rm/chosen"], "with the images of other rows"
    model = final_checkpoint(runs / "one") / "model"
    assert json.loads((model / "processor_config.json").read_text())["image_processor"]["size"]["longest_edge"] == 256

    tested = ("rm-test", "--model", str(model), "--pairs", str(images.held_out), "--images_key", "image")
    server.must_finish(*tested, "--device", "cpu", "--output", str(runs / "tested.jsonl"))
    rows, evaluated = read_rows(runs / "tested.jsonl"), read_rows(runs / "one" / "evals.jsonl")[-1]
    assert len(rows) == 16
    assert all(row["images"] for row in rows)
    margins = [row["reward_chosen"] - row["reward_rejected"] for row in rows]
    assert sum(margins) / 16 == pytest.approx(evaluated["eval/margin"], abs=1e-5), "what training evaluates"

    given = images.rl_words("--max_steps", "1", "--rollout_log_interval", "1", "--num_trajectories_to_save", "99")
    at = given.index("--reward")
    reward = ["--reward_pretrain", str(model), "--save_path", str(runs / "rl")]
    server.must_finish("rl", *given[:at], *given[at + 2 :], *reward)
    assert {row["status"] for row in read_rows(runs / "rl" / "rollouts" / "step_000001.jsonl")} == {"ok"}


def test_an_image_that_is_missing_is_named_by_its_row_and_field(
    server: ForkServer, images: VisionTask, runs: Path
) -> None:
    rows = [json.loads(line) for line in images.train.read_text().splitlines()]
    file = images.root / "missing.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], rows[1] | {"image": "gone.png"}]))
    ended = server.run(*words(images, runs / "run", "--prompt_data", str(file)))
    assert ended.code == 4, ended.output
    assert "gone.png is not there" in ended.output
    assert f"{file}:2:image" in ended.output
