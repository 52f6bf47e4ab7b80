"""Recipes of recommenders are read by their commands; those of MiniOneRec have the numbers of its scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_cli.config.recipes import read
from rft_cli.config.resolve import resolve

FOLDER = Path(__file__).parents[3] / "benchmarks" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SCRIPTS: dict[str, dict[str, Any]] = {
    # sft.sh, and what transformers' Trainer takes where the script is silent
    "minionerec-sft": {
        "train_batch_size": 1024,
        "micro_train_batch_size": 16,
        "learning_rate": 3e-4,
        "max_epochs": 10,
        "max_len": 512,
        "lr_warmup_steps": 20,
        "lr_schedule": "linear",
        "max_norm": 1.0,
        "patience": 3,
        "seed": 42,
        "nproc": 8,
    },
    # rl.sh, where its defaults differ from those of rl.py
    "minionerec-rl": {
        "train_batch_size": 1024,
        "rollout_batch_size": 64,
        "n_samples_per_prompt": 16,
        "actor_learning_rate": 1e-5,
        "num_episodes": 2,
        "init_kl_coef": 1e-3,
        "max_norm": 0.3,
        "lr_warmup_ratio": 0.03,
        "genrec_reward": "rule,ranking",
        "group_source": "beams",
        "temperature": 1.0,
        "zero_stage": 2,
        "seed": 42,
        "nproc": 8,
    },
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_read_by_its_command(recipe: Path, tmp_path: Path) -> None:
    given = ["--config", str(recipe), "--catalogue", str(tmp_path)]
    if "pretrain:" not in recipe.read_text() and read(recipe).command == "genrec-rl":
        given += ["--pretrain", str(tmp_path)]
    if "similar" in recipe.read_text():
        given += ["--item_embeddings", str(tmp_path / "items.npy")]
    resolved = resolve(read(recipe).command, given)
    expected = SCRIPTS.get(recipe.stem, {})
    assert {name: resolved.values[name] for name in expected} == expected


def test_both_scripts_have_a_recipe() -> None:
    assert set(SCRIPTS) <= {recipe.stem for recipe in RECIPES}
