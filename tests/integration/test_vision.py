"""Rows with images through every command: a model learns what it sees, and any cut of the work gives the same step."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision_task import VisionTask, make_vision_task, write_rows

from rft.build.images import row_images, tokenizer_with_images
from rft.build.prompt_data import as_prompts, read_held_out
from rft_cli.main import main
from rft_models.policy.load import load_policy
from rft_models.settings import WeightsSettings
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.runs.reader import read_run
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.settings.data import EvalDataSettings
from rft_trainer.settings.images import ControlledImageSettings
from rft_trainer.testing.bigram import OneRank

pytestmark = pytest.mark.xdist_group("vision")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> VisionTask:
    return make_vision_task(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def taught(task: VisionTask) -> Path:
    """A supervised run until the colours are known."""
    words = task.words("--train_batch_size", 16, "--micro_train_batch_size", 16, "--learning_rate", "3e-3")
    path = task.root / "taught"
    assert main(["sft", *words, "--max_epochs", "30", "--max_steps", "60", "--save_path", str(path)]) == 0
    return path


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    tensors = importlib.import_module("safetensors.torch")
    model = sorted(run.glob("checkpoints/step_*/model"))[-1]
    return {name: value for file in model.glob("*.safetensors") for name, value in tensors.load_file(file).items()}


def largest_difference(first: Path, second: Path) -> float:
    """Over all weights, relative to the largest weight of each tensor."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-3)) for n in ours)


def accuracy(capsys: pytest.CaptureFixture[str], *words: object) -> float:
    """What `eval` prints."""
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == 0
    return float(json.loads(capsys.readouterr().out.splitlines()[-1])["eval/accuracy"])


def problem_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The problem that a command is refused with."""
    capsys.readouterr()
    assert main([*map(str, words), "--json_errors"]) != 0
    return json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]


def test_a_model_learns_what_it_sees_and_falls_to_chance_on_images_of_others(
    task: VisionTask, taught: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--eval_data", task.held_out, "--images_key", "image", "--generate_max_len", 2)
    model = sorted((taught / "checkpoints").glob("step_*/model"))[-1]
    assert accuracy(capsys, "--pretrain", model, *given) >= 0.9
    assert accuracy(capsys, "--pretrain", model, *given, "--shuffle_images") <= 0.5
    assert accuracy(capsys, "--pretrain", task.model, *given) <= 0.5


def test_generate_answers_one_prompt_with_an_image(
    task: VisionTask, taught: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sorted((taught / "checkpoints").glob("step_*/model"))[-1]
    for number, name in enumerate("rgbw"):
        words = ["--pretrain", model, "--prompt", "colour?", "--image", task.root / f"{number:02d}.png"]
        capsys.readouterr()
        assert main(["generate", *map(str, words), "--temperature", "0", "--generate_max_len", "3"]) == 0
        assert capsys.readouterr().out.strip() == f"<image>colour?{name}"
    problem = problem_of(capsys, "generate", "--pretrain", model, "--prompt", "<image>or<image>?", *words[-2:])
    assert problem["code"] == "data.image_places"


def test_the_run_is_the_same_with_packing_and_with_any_cut(task: VisionTask) -> None:
    base = task.words("--train_batch_size", 12, "--max_steps", 3, "--learning_rate", "1e-3", data=task.mixed)
    for name, more in (
        ("whole", ["--micro_train_batch_size", "12"]),
        ("cut", ["--micro_train_batch_size", "2"]),
        ("packed", ["--packing_samples", "--max_tokens_per_micro_batch", "64"]),
    ):
        words = [*base, "--mixed_mm_data", "--adam_epsilon", "1e-3", *more, "--save_path", str(task.root / name)]
        assert main(["sft", *words]) == 0
    for name in ("cut", "packed"):
        assert largest_difference(task.root / name, task.root / "whole") < 1e-5


def prompts_of(task: VisionTask, file: Path) -> list[Prompt]:
    images = ControlledImageSettings(images_key="image", mixed_mm_data=True)
    tokenizer = tokenizer_with_images(WeightsSettings(pretrain=str(task.model)), images)
    rendered = read_held_out(
        str(file), "", 0, EvalDataSettings(), tokenizer,
        label_key="label", output_key=None, prompt_max_len=40, images=row_images(images, 0),
    )  # fmt: skip
    return as_prompts(rendered)


def test_text_rows_are_not_changed_by_the_images_beside_them(task: VisionTask) -> None:
    prompts = prompts_of(task, task.mixed)
    ids = prompts[2].token_ids[:2]
    groups = [
        RolloutGroup(
            prompt, 0, n,
            (Rollout(prompt.prompt_id, 0, ids, (0.0,) * 2, (0.0,) * 2, "stop", 0, "", 1.0, RewardStatus.OK),),
        )
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip
    policy = load_policy(task.model).eval()
    annotate = LogprobScorer(policy, OneRank(), max_sequences=9, max_tokens=0, temperature=1.0)
    together = annotate(groups)
    alone = annotate([group for group in groups if group.prompt.media is None])
    beside = [row for group, row in zip(groups, together, strict=True) if group.prompt.media is None]
    assert len(alone) == 16
    assert torch.tensor(beside).sub(torch.tensor(alone)).abs().max() < 1e-5
    without_image = [row for group, row in zip(groups, together, strict=True) if group.prompt.media is not None]
    assert len({row for row in without_image}) > 4, "other images give other log-probs"


def test_reinforcement_learning_raises_the_reward(task: VisionTask) -> None:
    warm, path = task.root / "warm", task.root / "learned"
    words = task.words("--train_batch_size", 16, "--micro_train_batch_size", 16, "--learning_rate", "3e-3")
    assert main(["sft", *words, "--max_steps", "4", "--max_epochs", "9", "--save_path", str(warm)]) == 0
    model = sorted((warm / "checkpoints").glob("step_*/model"))[-1]
    words = task.rl_words("--pretrain", model, "--eval_data", task.held_out, "--rollout_batch_size", 8)
    words += ["--n_samples_per_prompt", "8", "--train_batch_size", "64", "--micro_train_batch_size", "64"]
    words += ["--reward", "exact", "--max_steps", "25", "--num_episodes", "30", "--actor_learning_rate", "2e-3"]
    assert main(["rl", *words, "--save_path", str(path)]) == 0
    run = read_run(path)
    before, after = run.accuracy("before"), run.accuracy("after")
    assert before is not None
    assert after is not None
    assert before <= 0.8
    assert after >= before + 0.15
    rewards = [json.loads(line)["reward/mean"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) >= sum(rewards[:5]) + 1


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    task: VisionTask, capsys: pytest.CaptureFixture[str]
) -> None:
    words = task.rl_words(
        "--save_steps", 1, "--init_kl_coef", 0.1, "--mixed_mm_data", "--max_ckpt_num", 9, data=task.mixed
    )
    whole, parts = task.root / "run_whole", task.root / "run_parts"
    assert main(["rl", *words, "--save_path", str(whole)]) == 0
    assert main(["rl", *words, "--max_steps", "1", "--save_path", str(parts)]) == 0
    assert main(["resume", str(parts), "--max_steps", "2"]) == 0
    assert largest_difference(parts, whole) == 0.0


def test_a_run_whose_images_changed_is_not_resumed(task: VisionTask, capsys: pytest.CaptureFixture[str]) -> None:
    folder = task.root / "changing"
    folder.mkdir()
    rows = [json.loads(line) for line in task.train.read_text().splitlines()[:8]]
    for row in rows:
        (folder / row["image"]).write_bytes((task.root / row["image"]).read_bytes())
    data, run = write_rows(folder / "train.jsonl", rows), folder / "run"
    words = task.rl_words("--save_steps", 1, "--max_steps", 1, data=data)
    assert main(["rl", *words, "--save_path", str(run)]) == 0
    (folder / "00.png").write_bytes((task.root / "01.png").read_bytes())
    assert problem_of(capsys, "resume", run, "--max_steps", 2)["code"] == "identity.files_changed"


def test_two_ranks_with_weights_in_blocks_train_as_one_does(task: VisionTask) -> None:
    words = task.rl_words("--mixed_mm_data", "--init_kl_coef", 0.1, "--adam_epsilon", "1e-3", data=task.mixed)
    words += ["--rollout_log_interval", "1", "--num_trajectories_to_save", "99"]
    one, two = task.root / "one_rank", task.root / "two_ranks"
    assert main(["rl", *words, "--save_path", str(one)]) == 0
    assert main(["rl", *words, "--nproc", "2", "--fsdp", "--save_path", str(two)]) == 0
    for step in (1, 2):
        drawn = [(run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines() for run in (one, two)]
        ours, theirs = ([json.loads(line)["response"] for line in lines] for lines in drawn)
        assert len(ours) == 16
        assert ours == theirs
    assert largest_difference(two, one) < 1e-4


def test_check_says_what_the_images_come_to(task: VisionTask, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["check", "rl", *task.rl_words("--mixed_mm_data", data=task.mixed)]) == 0
    printed = capsys.readouterr().out
    assert "32 images in 32 of 48 rows, 4 features (tokens) each; longest prompt with images 13 tokens" in printed
    assert main(["check", "sft", *task.words()]) == 0
    assert "32 images in 32 of 32 rows" in capsys.readouterr().out


def test_a_text_row_among_images_is_named(task: VisionTask, capsys: pytest.CaptureFixture[str]) -> None:
    problem = problem_of(capsys, "rl", *task.rl_words(data=task.mixed))
    assert (problem["code"], problem["do"]) == ("data.row_without_image", "--mixed_mm_data")
    assert problem["where"] == f"{task.mixed}:3:image"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--limit_mm_image_per_prompt", 0), "data.too_many_images"),
        (("--aux_loss_coef", 0.1), "images.router_loss"),
        (("--fps", 2), "option.refused"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    task: VisionTask,
    more: tuple[object, ...],
    code: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = problem_of(capsys, "rl", *task.rl_words(*more))
    assert found["code"] == code
    assert not list(tmp_path.rglob("config.yaml"))


def test_pixels_are_capped_before_the_model_sees_them(task: VisionTask, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["check", "sft", *task.words("--max_pixels", 64)]) == 0
    assert "1 features (tokens) each" in capsys.readouterr().out


def test_the_script_of_the_guides_trains(task: VisionTask, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "examples" / "train_vl.py"
    spec = importlib.util.spec_from_file_location("train_vl", script)  # pyright: ignore[reportAttributeAccessIssue]
    module = importlib.util.module_from_spec(spec)  # pyright: ignore[reportAttributeAccessIssue]
    spec.loader.exec_module(module)
    with_images: Callable[[list[str]], list[str]] = module.with_images
    words = ["--pretrain", "M", "--mixed_mm_data", "--packing_samples"]
    assert with_images(words) == [*words, "--images_key", "image"]
    assert with_images([*words, "--images-key=picture"]) == [*words, "--images-key=picture"]
    given = [word for word in task.rl_words("--max_steps", 1) if word not in ("--images_key", "image")]
    path = task.root / "from_script"
    assert main(["rl", *with_images([*given, "--mixed_mm_data", "--packing_samples", "--save_path", str(path)])]) == 0
    assert read_run(path).summary["outcome"] == "finished"
