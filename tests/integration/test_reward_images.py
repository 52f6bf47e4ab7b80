"""Reward models of pairs about images: trained, resumed, tested, and used on prompts with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import differences, differing_tensors, final_checkpoint, read_rows
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


STRATEGIES = {"replicas": (), "fsdp": ("--fsdp",)}


def assert_same_steps(run: Path, expected: Path) -> None:
    for file in ("metrics.jsonl", "evals.jsonl"):
        rows, others = read_rows(run / file), read_rows(expected / file)
        assert len(rows) == len(others) > 0
        for row, other in zip(rows, others, strict=True):
            for name in ("rm/loss", "rm/chosen", "rm/rejected", "policy/gradient_norm", "eval/loss", "eval/margin"):
                assert (name in row) == (name in other), name
                assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4, abs=1e-6), name


def assert_same_to_the_bit(run: Path, expected: Path) -> None:
    files, others = (
        {str(f.relative_to(at)): f for f in at.rglob("*.safetensors")} for at in map(final_checkpoint, (run, expected))
    )
    assert files.keys() == others.keys()
    assert [name for name in files if differing_tensors(load_file(files[name]), load_file(others[name]))] == []
    for file in ("metrics.jsonl", "evals.jsonl"):
        assert read_rows(run / file) == read_rows(expected / file)


@pytest.mark.parametrize(("adapted", "killed"), [(False, "fsdp"), (True, "replicas")], ids=["all weights", "adapters"])
def test_ranks_take_the_steps_of_one_and_go_on_to_the_bit(
    server: ForkServer, images: VisionTask, runs: Path, adapted: bool, killed: str
) -> None:
    # rows with and without images, so that a rank may have none
    more = ("--prompt_data", str(images.mixed), "--mixed_mm_data", "--learning_rate", "1e-2", "--max_ckpt_num", "9")
    # of the decoder and of the tower
    more = (*more, "--lora_rank", "2", "--target_modules", "q_proj,v_proj,attn.qkv") if adapted else more
    kill = [("signal_at", ["rm.logged", 2, "SIGKILL"])]
    server.must_finish(*words(images, runs / "one", *more))
    for name, flags in STRATEGIES.items():
        server.must_finish(*words(images, runs / name, *more, *flags), num_ranks=2)
        assert_same_steps(runs / name, runs / "one")
    given = words(images, runs / "again", *more, *STRATEGIES[killed])
    assert server.run(*given, preludes=kill, num_ranks=2).code != 0
    server.must_finish("resume", str(runs / "again"), num_ranks=2)
    assert_same_to_the_bit(runs / "again", runs / killed)
    if adapted:
        assert server.run(*words(images, runs / "alone", *more), preludes=kill).code == KILLED
        server.must_finish("resume", str(runs / "alone"))
        assert differences(runs / "one", runs / "alone") == []
        moved = moved_tensors(runs / "one") - {"score.weight"}
        assert {"visual" in name for name in moved} == {False, True}
        assert all(name.endswith(("q_proj.weight", "v_proj.weight", "attn.qkv.weight")) for name in moved)


def moved_tensors(run: Path) -> set[str]:
    """Names of the weights that training changed."""
    file = "model/model.safetensors"
    before, after = (load_file(at / file) for at in (run / "checkpoints" / "step_000000", final_checkpoint(run)))
    return set(differing_tensors(before, after))


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
