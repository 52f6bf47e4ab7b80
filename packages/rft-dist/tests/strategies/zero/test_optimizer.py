"""ZeRO 1, 2 and 3: the same steps as replicas, at a share of the memory, and state that any number of ranks takes up.

Two processes run every case of `zero_ranks.py`; four a part, and go on from what the two saved; two from that of four.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_dist.strategies.zero.deepspeed_engine import ZeroOptions, load_deepspeed, verify_options
from rft_dist.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("zero")
PROGRAM = Path(__file__).with_name("zero_ranks.py")
STAGES = ("stage_1", "stage_2", "stage_3")


@dataclass(frozen=True)
class Found:
    folder: Path
    world_size: int
    printed: str

    def results(self, name: str) -> list[Any]:
        return [json.loads((self.folder / f"rank_{rank}.json").read_text())[name] for rank in range(self.world_size)]

    def weights(self, name: str, rank: int = 0) -> dict[str, Tensor]:
        tensors = load_file(self.folder / f"{name}_{rank}.safetensors")
        return {name: tensor for name, tensor in tensors.items() if "/" not in name}


def launch(world_size: int, out: Path, *arguments: str) -> Found:
    out.mkdir()
    compiled = {  # half of a launch is compiling what DeepSpeed imports
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(out.parent / "compiled"),
    }
    return Found(out, world_size, run_ranks(PROGRAM, world_size, out, *arguments, environment=compiled))


def put_together(found: Found, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(whole tensors, how often each of their elements was given) of the blocks of all ranks."""
    full_shards: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for rank in range(found.world_size):
        blocks = load_file(found.folder / f"{name}_shards_{rank}.safetensors")
        for i, place in enumerate(json.loads((found.folder / f"{name}_shards_{rank}.json").read_text())):
            block, own = blocks[f"{i}"], place["name"]
            box = tuple(slice(first, first + size) for first, size in zip(place["start"], block.shape, strict=True))
            full_shards.setdefault(own, torch.zeros(place["shape"], dtype=block.dtype))[box] = block
            times.setdefault(own, torch.zeros(place["shape"], dtype=torch.int64))[box] += 1
    return full_shards, times


def put_all_together(found: Found) -> str:
    """The folder, with a file of whole tensors for each stage."""
    for stage in STAGES:
        save_file(put_together(found, stage)[0], found.folder / f"{stage}_whole.safetensors")
    return str(found.folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(2, tmp_path_factory.mktemp("zero") / "two", "all")


@pytest.fixture(scope="module")
def four(two: Found) -> Found:
    return launch(4, two.folder.parent / "four", "base", put_all_together(two))


@pytest.fixture(scope="module")
def two_after_four(four: Found) -> Found:
    return launch(2, four.folder.parent / "two_after_four", "resharded", put_all_together(four))


@pytest.fixture(params=[2, 4])
def found(request: pytest.FixtureRequest) -> Found:
    return request.getfixturevalue({2: "two", 4: "four"}[request.param])


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest relative L2 distance of two sets of tensors."""
    assert sorted(first) == sorted(second)
    return max(float((first[n] - second[n]).norm() / second[n].norm().clamp(min=1e-12)) for n in second)


def verify_steps(found: Found, case: str, file: str, replicated: str = "replicated") -> None:
    for rank in range(found.world_size):
        assert distance(found.weights(file, rank), found.weights(replicated)) < 1e-4, case
    for result, expected in zip(found.results(case), found.results(replicated), strict=True):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert expected["norms"][-1] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_and_one_without_gradients_are_those_of_replicas(found: Found, stage: str) -> None:
    verify_steps(found, f"{stage}_steps", stage)


@pytest.mark.parametrize("stage", STAGES)
def test_they_are_so_for_any_cut_unclipped_offloaded_and_with_layers_computed_twice(two: Found, stage: str) -> None:
    verify_steps(two, f"{stage}_one", f"{stage}_one", "replicated_one")
    verify_steps(two, f"{stage}_unclipped", f"{stage}_unclipped", "replicated_unclipped")
    verify_steps(two, f"{stage}_recompute", f"{stage}_recompute")
    verify_steps(two, f"{stage}_offload", f"{stage}_offload")


def test_the_steps_do_clip(two: Found) -> None:
    assert distance(two.weights("replicated"), two.weights("replicated_unclipped")) > 1e-3


def test_overlapping_persistent_and_second_copies_change_nothing(two: Found, four: Found) -> None:
    verify_steps(two, "stage_2_overlap", "stage_2_overlap")
    verify_steps(two, "stage_3_overlap", "stage_3_overlap")
    verify_steps(two, "persistent", "persistent")
    verify_steps(four, "secondary", "secondary")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_stays(found: Found, stage: str) -> None:
    before = torch.nn.Linear(6, 6)
    assert before.weight.shape == found.weights(stage)["frozen.weight"].shape
    assert torch.equal(found.weights(stage)["frozen.weight"], found.weights("replicated")["frozen.weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_its_share(found: Found, stage: str) -> None:
    results = found.results(f"{stage}_steps")
    total, frozen = results[0]["total"], found.weights(stage)["frozen.weight"].numel()
    assert sum(result["moments"] for result in results) == total - frozen
    for result in results:
        assert result["moments"] <= (total - frozen) / found.world_size * 1.1
        assert result["held"] <= total / (found.world_size * 0.9 if stage == "stage_3" else 1)
    if stage == "stage_3":
        assert sum(result["held"] for result in results) == total


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_cover_weights_and_state_once_and_are_those_of_replicas(found: Found, stage: str) -> None:
    full_shards, times = put_together(found, stage)
    expected = load_file(found.folder / "replicated_0.safetensors")
    assert sorted(full_shards) == sorted(expected)
    for name, count in times.items():
        assert torch.equal(count, torch.ones_like(count)), name
        assert full_shards[name].dtype == expected[name].dtype
    assert distance(full_shards, expected) < 1e-4
    for name, whole in found.weights(stage).items():
        assert torch.equal(full_shards[name], whole)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_loading_equals_the_uninterrupted_one_to_the_bit(found: Found, stage: str) -> None:
    cases = (
        ["resumed"]
        if found.world_size == 4
        else ["resumed", *(f"resumed_{kind}" for kind in ("bf16", "offload", "float16"))]
    )
    for case in cases:
        assert found.results(f"{stage}_{case}") == [{"ranges": True, "blocks": True}] * found.world_size, case


def test_so_it_does_with_weights_that_are_kept_in_a_second_place(two: Found, four: Found) -> None:
    assert two.results("persistent_resumed") == [{"ranges": True, "blocks": True}] * 2
    assert four.results("secondary_resumed") == [{"ranges": True, "blocks": True}] * 4


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks_goes_on_as_replicas_do(four: Found, two_after_four: Found, stage: str) -> None:
    for found in (four, two_after_four):
        for result in found.results(f"{stage}_resharded"):
            assert result["loaded"]
            assert result["distance"] < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_fsdp_goes_on_under_zero(found: Found, stage: str) -> None:
    assert max(result["distance"] for result in found.results(f"{stage}_from_fsdp")) < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_on_one_rank_is_refused_on_all_and_leaves_no_trace(two: Found, stage: str) -> None:
    for kind in ("", "_bf16", "_offload", "_bf16_offload"):
        for result in two.results(f"{stage}_not_finite{kind}"):
            assert result == {"refused": True, "unchanged": True, "applied": True, "next": True}, kind


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_weights_step_in_float32(two: Found, stage: str) -> None:
    for close, small in zip(two.results(f"{stage}_bf16_close"), two.results(f"{stage}_bf16"), strict=True):
        assert close["distance"] < 0.01
        assert small["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert small["kept"] > 0.9  # two steps of 1e-5 move few bfloat16 weights,
        assert 1e-5 < small["moved"][0] <= small["moved"][1] < 4e-5  # and every float32 copy


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_may_be_of_another_type_beside_float32(two: Found, stage: str) -> None:
    for result in two.results(f"{stage}_frozen_narrow"):
        assert result["distance"] < 1e-4
        assert result["same"]
        assert result["frozen"] == "torch.bfloat16"
        assert result["untrained"] == ["frozen.weight"]
        for norm, expected in result["norms"]:
            assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_float16_lowers_its_scale_until_steps_are_applied(two: Found, stage: str) -> None:
    for result in (*two.results(f"{stage}_float16"), *two.results(f"{stage}_float16_offload")):
        assert result["applied"][:2] == [False, False]
        assert result["applied"][-4:] == [True] * 4
        assert 2**12 <= result["scale"] <= 2**16


@pytest.mark.parametrize("stage", STAGES)
def test_counts_that_differ_and_other_shapes_are_refused_on_every_rank(two: Found, stage: str) -> None:
    for result in two.results(f"{stage}_steps_differ"):
        assert result["codes"] == ["zero.steps_differ", "optimizer.state_differs"]


def test_nothing_is_printed(four: Found) -> None:
    assert four.printed == ""


def test_what_deepspeed_cannot_do_is_refused_with_the_nearest_that_it_can() -> None:
    weights = [torch.zeros(2, dtype=torch.bfloat16)]
    fine = ZeroOptions(stage=3, max_norm=1.0, hpz_size=2, overlap_comm=True)
    assert verify_options(weights, fine, 4) == torch.bfloat16
    with pytest.raises(OptionsError) as caught:
        verify_options(weights, replace(fine, hpz_size=3), 4)
    assert (caught.value.problem.code, caught.value.problem.do) == ("zero.zpg_size", "--zpg 2")
    assert verify_options([torch.zeros(1)], fine, 4, frozen=weights) == torch.float32
    with pytest.raises(OptionsError) as caught:
        verify_options(weights, fine, 4, frozen=[torch.zeros(1)])
    assert caught.value.problem.code == "zero.dtype"
    for other in (torch.zeros(1), torch.zeros(1, dtype=torch.float64)):
        with pytest.raises(OptionsError, match=r"float32, bfloat16.*float16") as caught:
            verify_options([*weights, other], fine, 4)
        assert caught.value.problem.code == "zero.dtype"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="uv sync --no-dev --inexact --extra deepspeed") as caught:
        load_deepspeed(torch.device("cpu"))
    assert caught.value.problem.code == "zero.not_installed"


def test_a_version_that_cannot_end_a_step_where_it_should_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(DeepSpeedEngine=object, __version__="0.19.0")
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(PreflightError, match=r"deepspeed 0\.19\.0") as caught:
        load_deepspeed(torch.device("cpu"))
    assert caught.value.problem.code == "zero.too_old"
