"""The pre-training term on demonstrations with images: its losses are transformers' own, on any ranks and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compare import differences, read_rows, relative_distance
from support.references import KILLED
from support.runs import ForkServer
from support.vision_task import VisionTask, make_vision_task, write_rows
from torch import Tensor

from rft_cli.main import main
from rft_models.vision.processor import load_vision_processor

pytestmark = pytest.mark.xdist_group("image_runs")

NUM_ROWS = 12
"""Of an update: all of them, so that the order of an epoch says nothing."""


@pytest.fixture(scope="module")
def images(memory_root: Path) -> VisionTask:
    return make_vision_task(memory_root / "ptx_images")


@pytest.fixture(scope="module")
def demonstrations(images: VisionTask) -> Path:
    """Rows of which every third is text alone."""
    rows = [json.loads(line) for line in images.mixed.read_text().splitlines()]
    return write_rows(images.root / "demonstrations.jsonl", rows[:NUM_ROWS])


def words(images: VisionTask, data: Path, run: Path, *more: object) -> list[str]:
    term = (
        "--pretrain_data",
        data,
        "--ptx_coef",
        "0.5",
        "--max_tokens_per_micro_batch",
        "64",
        "--adam_epsilon",
        "1e-3",
    )
    return ["rl", *images.rl_words(*term, "--save_path", run, "--save_steps", 1, *more)]


def twin(images: VisionTask, data: Path) -> tuple[float, dict[str, Tensor]]:
    """Mean loss a learned token and its gradients, row by row in the model of transformers."""
    from transformers import AutoModelForImageTextToText

    processor = load_vision_processor(images.model)
    model = AutoModelForImageTextToText.from_pretrained(images.model, dtype=torch.float32)
    total, num_tokens = torch.zeros(()), 0
    for row in map(json.loads, data.read_text().splitlines()):
        files = [images.root / row["image"]] if "image" in row else []
        prompt, media = processor.encode_media(row["input"], files)
        answer = [*processor.encode(row["output"]), processor.eos_ids[0]]
        given: dict[str, Any] = {"input_ids": torch.tensor([[*prompt, *answer]])}
        given["mm_token_type_ids"] = torch.zeros_like(given["input_ids"])
        if media is not None:
            [image] = media.images
            given |= {"pixel_values": image.pixel_values, "image_grid_thw": torch.tensor([image.grid])}
            given["mm_token_type_ids"] = (given["input_ids"] == media.image_token_id).int()
        logprobs = model(**given).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        total = total - sum(logprobs[place, token] for place, token in zip(places, answer, strict=True))
        num_tokens += len(answer)
    loss = total / num_tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_term_of_an_update_is_the_loss_of_transformers_with_its_gradient(
    server: ForkServer, images: VisionTask, demonstrations: Path, runs: Path
) -> None:
    found: list[dict[str, Tensor]] = []
    for coefficient in ("0.5", "1.5"):
        file, run = runs / f"{coefficient}.gradients", runs / coefficient
        more = ("--max_steps", 1, "--ptx_coef", coefficient)
        server.must_finish(*words(images, demonstrations, run, *more), preludes=[("save_gradients", [str(file)])])
        found.append(load_file(file))
    loss, gradients = twin(images, demonstrations)
    [row] = read_rows(runs / "0.5" / "metrics.jsonl")
    assert row["ptx/loss"] == pytest.approx(loss, rel=1e-5)
    # the rewards' part is the same in both, so the difference is the term's gradient
    assert any("visual" in name for name in gradients), "the tower learns from the term"
    term = {name: found[1][name] - found[0][name] for name in found[0]}
    by_end = {name.removeprefix("model."): value for name, value in term.items()}
    expected = {name.removeprefix("model."): value for name, value in gradients.items()}
    assert by_end.keys() == expected.keys()
    assert relative_distance([by_end[name] for name in expected], list(expected.values())) < 1e-3


def test_ranks_take_the_steps_of_one_and_a_killed_run_goes_on_to_the_bit(
    server: ForkServer, images: VisionTask, demonstrations: Path, runs: Path
) -> None:
    given = ("--max_steps", 3, "--train_batch_size", 8, "--eval_data", images.held_out, "--max_eval_samples", 2)
    server.must_finish(*words(images, demonstrations, runs / "one", *given))
    kill = [("signal_at", ["rl.logged", 2, "SIGKILL"])]
    assert server.run(*words(images, demonstrations, runs / "run", *given), preludes=kill).code == KILLED
    server.must_finish("resume", str(runs / "run"))
    assert differences(runs / "one", runs / "run") == []
    server.must_finish(*words(images, demonstrations, runs / "two", *given, "--fsdp"), num_ranks=2)
    rows, others = (read_rows(runs / name / "metrics.jsonl") for name in ("one", "two"))
    for row, other in zip(rows, others, strict=True):
        assert other["ptx/loss"] == pytest.approx(row["ptx/loss"], rel=1e-4)


def test_a_plain_text_with_an_image_is_refused(
    images: VisionTask, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--pretrain_text_key", "input", "--json_errors")
    assert main(words(images, images.train, runs / "run", *more)) == 4
    problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
    assert problem["code"] == "ptx.text_with_image"
    assert problem["where"] == f"{images.train}:1:image"
    assert not (runs / "run").exists()
