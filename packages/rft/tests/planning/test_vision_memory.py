"""Memory of a vision tower on a rank, against its formulas by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.planning import vision_memory
from rft.planning.vision_memory import activation_term, image_parts, planned_images, tower_part, weight_terms
from rft.planning.workload import RL, SFT
from rft_dist.planning.memory_estimate import MemoryTerm, TrainingMemoryConfig
from rft_dist.strategies.registry import SHARDINGS, run_dims, run_layout
from rft_models.files.vision_tower_sizes import TowerSizes

P, L, H, F = 10_007, 3, 20, 72
SIZES = TowerSizes(parameters=P, layers=L, hidden=H, ffn=F, heads=4, patches_per_token=4)
BLOCK = 16 * H


def block(weight_bytes: int) -> int:
    return weight_bytes * (6 * H + 4 * H + 5 * H + 5 * F) + 16 * H


def weights(trained: bool = True, **options: Any) -> dict[str, MemoryTerm]:
    return {term.name: term for term in weight_terms(SIZES, TrainingMemoryConfig(**options), trained=trained)}


def sizes_of(trained: bool = True, **options: Any) -> dict[str, int]:
    return {name: term.num_bytes for name, term in weights(trained, **options).items()}


def test_weights_gradients_and_moments_in_their_types() -> None:
    assert sizes_of() == {"tower parameters": 4 * P, "tower gradients": 4 * P, "tower moments": 8 * P}
    assert sizes_of(trained=False) == {"tower parameters": 4 * P}
    assert sizes_of(weight_bytes=2)["tower moments"] == 4 * P
    narrow = sizes_of(weight_bytes=2, master_copy=True)
    assert narrow == {"tower parameters": 2 * P, "tower gradients": 4 * P, "tower moments": 12 * P}
    assert sizes_of(weight_bytes=2, master_copy=True, average=True)["tower moments"] == 16 * P
    assert sizes_of(trained=False, reference=True)["tower of the reference"] == 4 * P


@pytest.mark.parametrize(
    ("sharding", "shared"),
    [
        ("replicated", set[str]()),
        ("zero1", {"tower moments"}),
        ("zero2", {"tower moments", "tower gradients"}),
        ("zero3", {"tower moments", "tower gradients", "tower parameters", "tower of the reference"}),
        ("fsdp", {"tower moments", "tower gradients", "tower parameters", "tower of the reference"}),
    ],
)
def test_ranks_share_out_what_they_share_of_the_decoder(sharding: str, shared: set[str]) -> None:
    alone = run_layout(SHARDINGS[sharding], run_dims(SHARDINGS[sharding], 1))
    pairs = replace(SHARDINGS[sharding], sp_size=2)
    whole = sizes_of(layout=alone, reference=True)
    spread = weights(layout=run_layout(pairs, run_dims(pairs, 6)), reference=True)
    for name, size in whole.items():
        assert spread[name].num_bytes == -(-size // (6 if name in shared else 1)), name
        assert ("6 ranks" in spread[name].formula) == (name in shared)
    one = weights(layout=alone)
    assert not any("ranks" in term.formula for term in one.values())
    two = weights(layout=run_layout(SHARDINGS[sharding], run_dims(SHARDINGS[sharding], 2)))
    assert {name for name, term in two.items() if "/ 2 ranks" in term.formula} == shared & two.keys()
    if sharding == "fsdp":
        groups = replace(SHARDINGS[sharding], shard_size=4)
        assert sizes_of(layout=run_layout(groups, run_dims(groups, 8)))["tower parameters"] == P


def test_where_and_when_the_parts_are() -> None:
    found = weights(host_moments=True, reference=True)
    assert {name for name, term in found.items() if term.on_host} == {"tower moments"}
    hosted = weights(host_weights=True, reference=True)
    assert {n for n, t in hosted.items() if t.on_host} == {
        "tower parameters",
        "tower of the reference",
        "tower gradients",
    }
    assert {name for name, term in found.items() if not term.in_rollout} == {"tower gradients"}


def test_activations_of_the_patches_behind_the_placeholders() -> None:
    term = activation_term(SIZES, TrainingMemoryConfig(), 11)
    assert term.num_bytes == 44 * L * block(4)
    assert not term.in_rollout
    narrow = activation_term(SIZES, TrainingMemoryConfig(weight_bytes=2), 11)
    assert narrow.num_bytes == 44 * L * block(2)
    kept = activation_term(SIZES, TrainingMemoryConfig(recomputes=True), 11)
    assert kept.num_bytes == 44 * (L * 4 * H + block(4))
    assert not kept.in_rollout


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory holds the tower of `SIZES`."""
    monkeypatch.setattr(vision_memory, "tower_sizes", lambda directory: SIZES)


def part(tokens: int | None = 11, run: TrainingMemoryConfig | None = None, **values: Any) -> Any:
    given = {"pretrain": "m", "images_key": "image", "micro_train_batch_size": 2, **values}
    number, terms, notes = tower_part(given, run or TrainingMemoryConfig(), tokens)
    return number, {term.name: term.num_bytes for term in terms}, notes


def test_a_model_of_text_has_no_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_memory, "tower_sizes", lambda directory: None)
    assert part() == (0, {}, [])


@pytest.mark.usefixtures("tower")
def test_a_tower_that_no_row_uses_is_held_and_not_trained() -> None:
    number, terms, notes = part(images_key="")
    assert number == P
    assert terms == {"tower parameters": 4 * P}
    assert len(notes) == 1


@pytest.mark.usefixtures("tower")
def test_a_tower_is_trained_with_the_activations_of_a_micro_batch() -> None:
    number, terms, notes = part()
    assert number == P
    assert set(terms) == {"tower parameters", "tower gradients", "tower moments", "tower activations"}
    assert terms["tower activations"] == 2 * 44 * L * block(4)
    assert "frozen" not in notes[0]


@pytest.mark.usefixtures("tower")
@pytest.mark.parametrize("prefix", ["visual", "x,model.vision_tower"])
def test_a_frozen_tower_keeps_neither_gradients_nor_activations(prefix: str) -> None:
    _, terms, notes = part(freeze_prefix=prefix)
    assert set(terms) == {"tower parameters"}
    assert "frozen" in notes[0]
    assert "tower gradients" in part(freeze_prefix="embed")[1]


@pytest.mark.usefixtures("tower")
def test_beside_adapters_the_tower_is_not_trained() -> None:
    _, terms, _ = part(run=TrainingMemoryConfig(adapter_weights=5))
    assert set(terms) == {"tower parameters", "tower activations"}


@pytest.mark.usefixtures("tower")
def test_without_a_row_activations_are_left_out_and_told() -> None:
    _, terms, notes = part(tokens=None)
    assert "tower activations" not in terms
    assert len(notes) == 2


def planned(tmp_path: Path, **changes: Any) -> Any:
    (tmp_path / "model").mkdir(exist_ok=True)
    base = {"images_key": "image", "prompt_data": str(tmp_path / "rows.jsonl"), "max_len": None}
    base |= changes
    return SimpleNamespace(
        images=SimpleNamespace(images_key=base["images_key"]),
        model=SimpleNamespace(pretrain=str(tmp_path / "model")),
        data=SimpleNamespace(prompt_data=base["prompt_data"]),
        sampling=SimpleNamespace(prompt_max_len=77),
        training=SimpleNamespace(max_len=base["max_len"]),
    )


@pytest.mark.usefixtures("tower")
def test_images_are_counted_where_data_and_processor_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    plan = SimpleNamespace(tokens_a_row=(1, 2.0, 11))
    monkeypatch.setattr(
        vision_memory, "image_plan", lambda settings, limit, limit_flag: (asked.append((limit, limit_flag)), plan)[1]
    )
    settings = planned(tmp_path)
    assert planned_images(RL, planned(tmp_path, images_key=""), None) == (None, [])
    for file in ("rows.jsonl", "model/preprocessor_config.json", "model/tokenizer_config.json"):
        found, notes = planned_images(RL, settings, None)
        assert found is None
        assert len(notes) == 1
        (tmp_path / file).write_text("{}")
    assert planned_images(RL, settings, None) == (plan, [])
    assert planned_images(SFT, settings, 99) == (plan, [])
    assert planned_images(SFT, planned(tmp_path, max_len=55), 99) == (plan, [])
    assert planned_images(SFT, settings, None) == (plan, [])
    assert asked == [(77, "--prompt_max_len"), (99, "--max_len"), (55, "--max_len"), (1 << 31, "--max_len")]
    (tmp_path / "model/preprocessor_config.json").rename(tmp_path / "model/processor_config.json")
    assert planned_images(RL, settings, None) == (plan, [])
    (tmp_path / "model/tokenizer_config.json").unlink()
    assert planned_images(RL, settings, None)[0] is None
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    for text, absent in (("", "prompt_data"), (f"{tmp_path}/rows.jsonl, {tmp_path}/none.jsonl", f"{tmp_path}/none")):
        found, [note] = planned_images(RL, planned(tmp_path, prompt_data=text), None)
        assert found is None
        assert absent in note
    assert planned_images(RL, planned(tmp_path, prompt_data=f"{tmp_path}/*.none, {tmp_path}/rows.jsonl"), None)[0]
    monkeypatch.setattr(vision_memory, "tower_sizes", lambda directory: None)
    assert planned_images(RL, planned(tmp_path, prompt_data=""), None)[0] is plan, "the start says it better"


@pytest.mark.usefixtures("tower")
def test_a_plan_joins_the_tokens_of_images_with_the_terms_of_the_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(tokens_a_row=(1, 2.0, 11))
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vision_memory, "planned_images", lambda *given: (asked.append(given), (plan, ["unread"]))[1])
    values = {"pretrain": "m", "images_key": "image", "micro_train_batch_size": 1}
    settings = planned(tmp_path)
    found = image_parts(RL, settings, values, TrainingMemoryConfig(), 64, reads_rows=True)
    assert asked == [(RL, settings, 64)]
    assert (found.images, found.parameters) == (plan, P)
    assert found.terms[-1].num_bytes == 44 * L * block(4)
    assert found.notes[0] == "unread"
    monkeypatch.setattr(vision_memory, "planned_images", lambda workload, settings, positions: (None, []))
    none = image_parts(RL, planned(tmp_path), values, TrainingMemoryConfig(), None, reads_rows=True)
    assert none.images is None
    assert "tower activations" not in {term.name for term in none.terms}
    monkeypatch.setattr(vision_memory, "planned_images", None)  # nobody may ask it
    unread = image_parts(RL, settings, values, TrainingMemoryConfig(), 64, reads_rows=False)
    assert {term.name for term in unread.terms} == {"tower parameters", "tower gradients", "tower moments"}
