"""Checkpoints of vision-language models: one set of names, and the same bits under every way to lie on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.image_checkpoints import FAMILIES, WAYS, one_process, open_spread, opened, passed_on, save, take_a_step
from torch import Tensor

from rft.checkpoints.export import export
from rft_dist.testing.ranks import run_ranks
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model

PROGRAM = Path(__file__).parents[1] / "support" / "image_checkpoints.py"
FROM_RANKS = [(family, way) for family in FAMILIES for way in WAYS]

pytestmark = [pytest.mark.xdist_group("image_checkpoints"), pytest.mark.night]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image_models")
    sizes = VisionSizes(hidden=32, ffn=48, vision_hidden=32)
    for family in FAMILIES:
        tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
        build_vision_model(path / family, tokenizer, model_type=family, sizes=sizes, seed=4, init_std=0.2)
    return path


@pytest.fixture(scope="module")
def begun(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process saved after a step, by family."""
    out = tmp_path_factory.mktemp("begun")
    for family in FAMILIES:
        spread = open_spread(models / family, one_process(), None)
        take_a_step(spread)
        save(spread, one_process(), out / family)
    return out


@pytest.fixture(scope="module")
def passed(models: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks made of it, by family and way."""
    out = tmp_path_factory.mktemp("passed")
    environment = {"PYTHONPATH": str(PROGRAM.parents[1]), "DS_ACCELERATOR": "cpu"}
    run_ranks(PROGRAM, 2, out, models, begun, environment=environment, seconds=280)
    return out


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """By the names in the model directory, from as many files as wrote them."""
    found: dict[str, Tensor] = {}
    for file in sorted((checkpoint / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different[:5]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_saves_the_names_of_the_source(models: Path, begun: Path, family: str) -> None:
    source = load_file(models / family / "model.safetensors")
    saved = weights(begun / family / "step_000001")
    assert saved.keys() == source.keys()
    assert not all(torch.equal(saved[name], source[name]) for name in source), "a step was taken"


@pytest.mark.parametrize(("family", "way"), FROM_RANKS)
def test_from_one_process_to_two_ranks_and_back_no_name_and_no_bit_changes(
    models: Path, begun: Path, passed: Path, family: str, way: str, tmp_path: Path
) -> None:
    first, second = begun / family / "step_000001", passed / family / way.replace(" ", "_") / "step_000001"
    assert_same(weights(second), weights(first))
    if way in ("fsdp", "zero 3"):
        index = json.loads((second / "model" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == weights(first).keys()
        assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    back = passed_on(models / family, second, one_process(), tmp_path)
    assert_same(weights(back), weights(first))
    moments = opened(first).tensors("optimizer")
    assert any(name.startswith("ema/model.") for name in moments)
    assert_same(opened(back).tensors("optimizer"), moments)


@pytest.mark.parametrize(("family", "way"), FROM_RANKS)
def test_exports_of_all_ways_are_one(
    begun: Path, passed: Path, family: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests: set[str] = set()
    checkpoints = (begun / family / "step_000001", passed / family / way.replace(" ", "_") / "step_000001")
    for number, checkpoint in enumerate(checkpoints):
        for averages in (False, True):
            target = tmp_path / f"{number}{averages}"
            export(checkpoint, target, averages=averages)
            told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
            digests.add(f"{averages} {told[0]['sha256']}")
            assert load_policy(target).packed
            assert load_file(target / "model.safetensors").keys() == weights(checkpoint).keys()
    assert len(digests) == 2, "one of the weights and one of their averages"


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_with_the_names_of_memory_still_open_and_export(
    models: Path, begun: Path, family: str, tmp_path: Path
) -> None:
    """As ranks with weights in blocks saved them before there was one set of names."""
    from safetensors.torch import save_file

    policy = load_policy(begun / family / "step_000001" / "model")
    older = tmp_path / "older"
    policy.save_pretrained(older)
    tensors = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    save_file(tensors, older / "model.safetensors", metadata={"format": "pt"})
    again = load_policy(older)
    assert_same({name: p.detach() for name, p in again.named_parameters()}, tensors)
    again.save_pretrained(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_same(exported, {name: p.detach() for name, p in to_checkpoint_names(again.model, again.named_parameters)()})


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_read_their_blocks_alone_compute_and_step_as_those_that_loaded_all(
    passed: Path, family: str
) -> None:
    for rank in range(2):
        found = json.loads((passed / f"rank_{rank}.json").read_text())[family]
        assert found == dict.fromkeys(("before", "loss", "norm", "after"), True)
