"""What a start refuses and says of memory: on planted machines, with the planner's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.planning import start_plan, vision_memory
from rft.planning.start_plan import DPO_START, RL_START, RM_START, SFT_START, Room, planned, rooms_of
from rft.planning.workload import RL, SFT
from rft.resolved import Origin, Resolved, flat
from rft.settings import DpoSettings, RlSettings, RmSettings, SftSettings
from rft_core.errors import PreflightError
from rft_models.files.vision_tower_sizes import TowerSizes
from rft_models.settings import ModelSettings

GIB = 2**30
EIGHT_BILLION = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""Sizes of Llama 3 8B: 8,030,261,248 weights, so 29.92 GiB of four bytes or 14.96 GiB of two."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NUM_NODES", "GPUS_PER_NODE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EIGHT_BILLION))
    return folder


def asked(command: str, model: Path, **given: Any) -> Resolved[Any]:
    kinds: dict[str, Any] = {"sft": SftSettings, "rl": RlSettings, "dpo": DpoSettings, "rm": RmSettings}
    settings = kinds[command](model=ModelSettings(pretrain=str(model)))
    values = flat(settings)
    origins = dict.fromkeys(values, Origin("default"))
    empty: Resolved[Any] = Resolved(command, settings, values, origins, "", tuple[Path, ...](), (), "")
    return empty.with_values({"pretrain": str(model), "max_len": 512} | given, Origin("command line"))


def gpu(total: float, free: float | None = None, ranks: int = 1) -> Room:
    return Room("GPU 0 (a card)", int(total * GIB), int((total if free is None else free) * GIB), ranks, of_host=False)


def host(total: float, ranks: int = 1, *, holds_all: bool = False) -> Room:
    return Room("this machine", int(total * GIB), int(total * GIB), ranks, of_host=True, holds_all=holds_all)


@pytest.mark.parametrize(
    ("given", "total", "refused"),
    [
        ({}, 119.0, True),  # 4 x 29.92
        ({}, 121.0, False),
        ({"bf16": True}, 59.0, True),
        ({"bf16": True}, 60.5, False),
        ({"bf16": True, "lora_rank": 8}, 14.0, True),
        ({"bf16": True, "lora_rank": 8}, 24.0, False),
        ({"use_mp_opt": True}, 80.0, True),
        # what is frozen has neither gradients nor moments
        ({"bf16": True, "freeze_prefix": "model.layers.0."}, 24.0, False),
    ],
)
def test_weights_gradients_and_moments_that_are_more_than_there_is_are_refused(
    model: Path, given: dict[str, Any], total: float, refused: bool
) -> None:
    resolved = asked("sft", model, **given)
    if not refused:
        assert planned(resolved, SFT, 1, [gpu(total)]).values == resolved.values
        return
    with pytest.raises(PreflightError) as caught:
        planned(resolved, SFT, 1, [gpu(total)])
    problem = caught.value.problem
    assert problem.code == "memory.no_room"
    assert f"GPU 0 (a card) has {total:.2f} GiB" in problem.what
    assert str(model) in problem.where


def test_the_largest_part_is_named_with_its_bytes(model: Path) -> None:
    with pytest.raises(PreflightError) as caught:
        planned(asked("sft", model), SFT, 1, [gpu(79.0)])
    problem = caught.value.problem
    assert "take 119.66 GiB" in problem.what
    assert problem.why.endswith("the largest part is Adam moments")
    assert "Adam moments 59.83 GiB (8,030,261,248 x 8 bytes); parameters 29.92 GiB" in problem.where


@pytest.mark.parametrize(
    ("given", "world_size", "rooms", "remedy"),
    [
        ({}, 8, [gpu(79.0), host(900.0, 8)], "--fsdp"),
        ({}, 1, [gpu(79.0), host(900.0)], "--adam_offload"),
        # the moments are in the memory of the machine then, which is as full
        ({}, 1, [gpu(79.0), host(32.0)], "--lora_rank 16"),
        ({"adam_offload": True}, 1, [gpu(20.0), host(900.0)], "--fsdp on 4 GPUs"),
        ({"optimizer": "muon", "lora_rank": 0}, 1, [host(80.0, holds_all=True)], "--lora_rank 16"),
        ({"lora_rank": 8}, 1, [host(20.0, holds_all=True)], "a smaller model"),
    ],
)
def test_the_remedy_is_one_that_fits_by_the_same_plan(
    model: Path, given: dict[str, Any], world_size: int, rooms: list[Room], remedy: str
) -> None:
    with pytest.raises(PreflightError) as caught:
        planned(asked("sft", model, **given), SFT, world_size, rooms)
    assert caught.value.problem.do.startswith(remedy)


def test_ranks_of_one_machine_share_its_memory(model: Path) -> None:
    resolved = asked("sft", model, bf16=True)
    assert planned(resolved, SFT, 1, [host(100.0, 1, holds_all=True)]) is resolved
    with pytest.raises(PreflightError, match="in each of 2 ranks, and this machine has 100"):
        planned(resolved, SFT, 2, [host(100.0, 2, holds_all=True)])


def test_a_reference_is_counted_where_the_algorithm_has_one(model: Path) -> None:
    given = {"bf16": True, "prompt_max_len": 64, "generate_max_len": 64}
    fits = asked("rl", model, **given, init_kl_coef=0.0)
    assert planned(fits, RL, 1, [gpu(62.0)]).values == fits.values
    with pytest.raises(PreflightError, match=r"74\.79 GiB"):
        planned(asked("rl", model, **given, init_kl_coef=0.1), RL, 1, [gpu(62.0)])


def test_a_step_that_may_not_fit_is_a_note_with_the_flags_that_help(model: Path) -> None:
    found = planned(asked("sft", model, bf16=True, max_len=8192), SFT, 1, [gpu(79.0)])
    (note,) = found.notes
    assert note.startswith("memory: a step takes up to ")
    assert "of 71.10 GiB" in note
    assert "--fused_linear_logprob" in note
    small = planned(asked("sft", model, bf16=True, lora_rank=8, max_len=64), SFT, 1, [gpu(79.0)])
    assert small.notes == ()


def test_memory_that_another_program_holds_is_said(model: Path) -> None:
    found = planned(asked("sft", model, bf16=True, lora_rank=8, max_len=64), SFT, 1, [gpu(79.0, free=10.0)])
    (note,) = found.notes
    assert "10.00 GiB of 79.00 GiB are free on GPU 0 (a card)" in note


def test_a_vision_tower_is_counted_and_no_row_is_read_for_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = TowerSizes(parameters=4 * GIB, layers=32, hidden=1280, ffn=3420, heads=16, patches_per_token=4)
    monkeypatch.setattr(vision_memory, "tower_sizes", lambda directory: tower)
    monkeypatch.setattr(vision_memory, "planned_images", None)
    seeing = asked("sft", model, images_key="images", bf16=True)
    # 4 x (14.96 + 8.00) of two bytes
    with pytest.raises(PreflightError, match=r"91.83 GiB") as caught:
        planned(seeing, SFT, 1, [gpu(90.0)])
    assert "tower moments 16.00 GiB" in caught.value.problem.where
    [note] = planned(seeing, SFT, 1, [gpu(92.5)]).notes
    assert note.endswith("besides what the vision tower keeps of the images (rft-train plan counts it)")
    frozen = asked("sft", model, images_key="images", bf16=True, freeze_prefix="visual")
    planned(frozen, SFT, 1, [gpu(60.0)])


def test_what_cannot_be_planned_is_left_to_the_start(model: Path, tmp_path: Path) -> None:
    for resolved in (asked("sft", tmp_path), asked("sft", model, ep_size=3)):
        assert planned(resolved, SFT, 1, [gpu(1.0)]) is resolved
    assert planned(asked("sft", model), SFT, 1, []).notes == ()


@pytest.mark.parametrize(
    ("limit", "total", "free"), [("", 12 * 1024, 8 * 1024), ("max", 12 * 1024, 8 * 1024), ("4096", 4096, 4096)]
)
def test_the_memory_of_a_cpu_run_is_that_of_the_machine_or_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, total: int, free: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable: 6 kB\nSwapTotal: 2 kB\n")
    (tmp_path / "max").write_text(f"{limit}\n")
    monkeypatch.setattr(start_plan, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(start_plan, "_GROUP", tmp_path / ("max" if limit else "absent"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    machine: Any = SimpleNamespace(device="cpu", ranks=SimpleNamespace(world_size=6))
    assert rooms_of(machine) == [Room("this machine", total, free, 3, of_host=True, holds_all=True)]
    monkeypatch.setattr(start_plan, "_MEMORY", tmp_path / "absent")
    assert rooms_of(machine) == []


@pytest.mark.parametrize(
    ("command", "start"), [("sft", SFT_START), ("dpo", DPO_START), ("rm", RM_START), ("rl", RL_START)]
)
def test_every_stage_refuses_at_its_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, command: str, start: Any
) -> None:
    machine: Any = SimpleNamespace(device="cpu", ranks=SimpleNamespace(world_size=1))
    monkeypatch.setattr(start_plan, "rooms_of", lambda _: [host(16.0, holds_all=True)])
    with pytest.raises(PreflightError, match="this machine has 16"):
        start(asked(command, model), machine)
    monkeypatch.setattr(start_plan, "rooms_of", lambda _: [host(999.0, holds_all=True)])
    resolved = asked(command, model)
    assert start(resolved, machine) is resolved
