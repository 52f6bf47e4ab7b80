"""Whole runs on rows with and without images: every way to lie on ranks takes the steps of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import differing_tensors, final_checkpoint, read_rows, relative_distance
from support.runs import ForkServer
from support.vision_task import VisionTask, make_vision_task
from torch import Tensor

from rft.build.images import refuse_beside_images
from rft_cli.main import main
from rft_core.errors import OptionsError
from rft_dist.settings import StrategySettings
from rft_models.settings import ModelSettings
from rft_models.vision.processor import load_vision_processor
from rft_trainer.settings.images import ImageSettings

pytestmark = pytest.mark.xdist_group("image_runs")

WAYS = {
    "shared sequences": ("--sp_size", "2"),
    "shared sequences by a ring, in blocks": ("--sp_size", "2", "--sp_mode", "ring", "--fsdp"),
    "blocks from files": ("--fsdp", "--meta_init"),
    "blocks, layers computed again": ("--fsdp", "--gradient_checkpointing"),
    "zero 3": ("--zero_stage", "3", "--gradient_checkpointing"),
}
ADAPTERS = {
    "language layers": ("q_proj,k_proj", "language_model"),
    "the tower alone": ("attn.qkv,attn.proj", "visual"),
}
GAE = ("--advantage_estimator", "gae", "--critic_learning_rate", "1e-3", "--lambd", "0.9", "--gamma", "0.9")


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "images")


def words(images: VisionTask, path: Path, *more: object) -> list[str]:
    """Two steps on mixed rows, with a reference; the update follows the gradient without magnifying its noise."""
    given = ("--mixed_mm_data", "--init_kl_coef", 0.1, "--adam_epsilon", "1e-3", "--rollout_log_interval", 1)
    given = (*given, "--num_trajectories_to_save", 99, "--save_path", path, *more)
    return ["rl", *images.rl_words(*given, data=images.mixed)]


@pytest.fixture(scope="module")
def one(server: ForkServer, images: VisionTask) -> Path:
    """The run of one process."""
    path = images.root / "one"
    server.must_finish(*words(images, path))
    return path


def weights(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def update(images: VisionTask, run: Path) -> list[Tensor]:
    """What training added to each weight, by the names of the published files."""
    before, after = load_file(images.model / "model.safetensors"), weights(run)
    assert before.keys() == after.keys()
    return [after[name] - before[name] for name in sorted(before)]


def assert_same_steps(images: VisionTask, run: Path, expected: Path) -> None:
    for step in (1, 2):
        ours, theirs = (read_rows(each / "rollouts" / f"step_{step:06d}.jsonl") for each in (run, expected))
        assert [row["response"] for row in ours] == [row["response"] for row in theirs]
    for row, other in zip(read_rows(run / "metrics.jsonl"), read_rows(expected / "metrics.jsonl"), strict=True):
        for name in ("policy/loss", "policy/gradient_norm", "reward/mean", "critic/loss", "critic/explained_variance"):
            assert (name in row) == (name in other)
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4, abs=1e-6), name
    assert relative_distance(update(images, run), update(images, expected)) < 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_take_the_steps_of_one_process(
    server: ForkServer, images: VisionTask, one: Path, runs: Path, way: str
) -> None:
    server.must_finish(*words(images, runs / "run", *WAYS[way]), num_ranks=2)
    assert_same_steps(images, runs / "run", one)


@pytest.mark.night
def test_a_critic_that_sees_trains_alike_on_one_and_two_ranks_and_goes_on_to_the_bit(
    server: ForkServer, images: VisionTask, runs: Path
) -> None:
    given = (*GAE, "--save_steps", 1, "--max_ckpt_num", 9, "--save_value_network")
    server.must_finish(*words(images, runs / "one", *given))
    server.must_finish(*words(images, runs / "two", *given), num_ranks=2)
    assert_same_steps(images, runs / "two", runs / "one")
    begun = images_seen(final_checkpoint(runs / "one"))
    for name, tensor in images_seen(final_checkpoint(runs / "two")).items():
        torch.testing.assert_close(tensor, begun[name], rtol=1e-4, atol=1e-5, msg=name)
    server.must_finish(*words(images, runs / "blocks", *GAE, "--fsdp"), num_ranks=2)
    assert_same_steps(images, runs / "blocks", runs / "one")
    server.must_finish(*words(images, runs / "parts", *given, "--max_steps", 1))
    server.must_finish("resume", str(runs / "parts"), "--max_steps", "2")
    assert not differing_tensors(images_seen(final_checkpoint(runs / "parts")), begun)
    assert not differing_tensors(weights(runs / "parts"), weights(runs / "one"))
    saved = final_checkpoint(runs / "one") / "model" / "critic"
    server.must_finish(*words(images, runs / "again", *GAE, "--critic_pretrain", saved))


def images_seen(checkpoint: Path) -> dict[str, Tensor]:
    """The critic's weights, which images have changed."""
    found = load_file(checkpoint / "state" / "critic.safetensors")
    assert any("visual" in name for name in found)
    return found


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_a_part_train_alike_on_one_and_two_ranks(
    server: ForkServer, images: VisionTask, runs: Path, kind: str
) -> None:
    targets, part = ADAPTERS[kind]
    given = ("--lora_rank", 2, "--target_modules", targets, "--actor_learning_rate", "1e-2")
    server.must_finish(*words(images, runs / "one", *given))
    server.must_finish(*words(images, runs / "two", *given, "--fsdp"), num_ranks=2)
    assert_same_steps(images, runs / "two", runs / "one")
    file = "model/adapter/adapter_model.safetensors"
    trained = load_file(final_checkpoint(runs / "two") / file)
    assert trained.keys() == load_file(final_checkpoint(runs / "one") / file).keys()
    assert all(f".{part}." in name for name in trained)
    changed = {name for name, tensor in zip(sorted(weights(runs / "two")), update(images, runs / "two"), strict=True)
               if float(tensor.abs().max()) > 0}  # fmt: skip
    assert all(("visual" in name) == (part == "visual") for name in changed)
    assert changed


def test_a_run_goes_from_one_process_to_blocks_and_back(
    server: ForkServer, images: VisionTask, one: Path, runs: Path
) -> None:
    path = runs / "run"
    base = words(images, path, "--max_steps", 1)
    server.must_finish(*base)
    server.must_finish("resume", str(path), "--fsdp", "--max_steps", "2", num_ranks=2)
    assert_same_steps(images, path, one)
    names = load_file(images.model / "model.safetensors").keys()
    for checkpoint in (path / "checkpoints").glob("step_*[0-9]"):
        files = sorted((checkpoint / "model").glob("*.safetensors"))
        assert {name for file in files for name in load_file(file)} == names
    server.must_finish("resume", str(path), "--no-fsdp", "--max_steps", "3")
    server.must_finish("export", str(path), str(runs / "exported"))
    assert load_file(runs / "exported" / "model.safetensors").keys() == names


@pytest.mark.parametrize(
    ("more", "code", "words_of_it"),
    [
        (("--aux_loss_coef", 0.01), "images.router_loss", "aux_loss_coef = 0.01"),
        (("--min_pixels", 99_999), "images.beyond_processor", "min_pixels = 99,999"),
        (("--max_pixels", 10), "images.below_one_feature", "max_pixels = 10"),
        ((*GAE, "--critic_pretrain", "TEXT"), "images.other_inputs", "a qwen2 model, which takes no images"),
    ],
)
def test_what_cannot_be_done_says_why_before_anything_is_written(
    images: VisionTask, more: tuple[object, ...], code: str, words_of_it: str, runs: Path,
    character_model: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = [character_model if word == "TEXT" else word for word in more]
    assert main([*words(images, runs / "run", *given), "--json_errors"]) != 0
    problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
    assert problem["code"] == code
    assert words_of_it in problem["what"]
    assert problem["why"]
    assert problem["do"]
    assert not (runs / "run").exists()


def test_matrices_in_parts_beside_images_are_refused(images: VisionTask) -> None:
    given = (ImageSettings(images_key="image"), StrategySettings(tp_size=2), ModelSettings(pretrain=str(images.model)))
    with pytest.raises(OptionsError) as caught:
        refuse_beside_images(*given, load_vision_processor(images.model))
    assert caught.value.problem.code == "images.parts"
    assert caught.value.problem.do == "--tp_size 1 --fsdp"


@pytest.fixture(scope="module")
def character_model(memory_root: Path) -> Path:
    from rft_models.tiny_models.text import build_character_model

    path = memory_root / "text_critic"
    return build_character_model(path, alphabet="abc", hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
