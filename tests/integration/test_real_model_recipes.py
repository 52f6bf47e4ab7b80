"""Recipes for real models: the plan of each from the published config.json, and rows in the columns of its data.

A hub on loopback serves the models' shapes and generated rows under the real names; nothing real is read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.utils import close_session
from support.hub_server import Hub, ask_in_place_of_the_hub, running_hub

from rft.hub.sources import located_sources
from rft_cli.commands import plan
from rft_cli.config import recipes
from rft_cli.config.resolve import resolve
from rft_dist.strategies.registry import choose_strategy, strategy_settings
from rft_trainer.data.sources import load_prompts

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "real-models.md"
GIB = 2**30
QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "vocab_size": 151936, "tie_word_embeddings": True}


def shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """A config.json as published, without what changes no size."""
    return QWEN | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        **more,
    }


SHAPES = {
    "0.5B": (shape(896, 24, 14, 2, 4864), 494_032_768),
    "1.5B": (shape(1536, 28, 12, 2, 8960), 1_543_714_304),
    "7B": (shape(3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False), 7_615_616_512),
}
"""config.json and number of parameters of Qwen2.5, base and Instruct."""

RUNS = {
    "qwen2.5-0.5b-gsm8k-24gb": ("rl", 1, 1, "data_parallel", "vllm"),
    "qwen2.5-1.5b-gsm8k-lora-24gb": ("rl", 1, 1, "data_parallel", "vllm"),
    "qwen2.5-1.5b-gsm8k-80gb": ("rl", 1, 1, "data_parallel", "vllm"),
    "qwen2.5-7b-math-lora-80gb": ("rl", 1, 1, "data_parallel", "vllm"),
    "qwen2.5-7b-math-8x80gb": ("rl", 1, 8, "fsdp", "vllm"),
    "qwen2.5-7b-math-2x8x80gb": ("rl", 2, 8, "fsdp", "vllm"),
    "qwen2.5-7b-dapo-8x80gb": ("rl", 1, 8, "zero", "vllm"),
    "qwen2.5-0.5b-alpaca-sft-24gb": ("sft", 1, 1, "data_parallel", None),
    "qwen2.5-7b-alpaca-sft-lora-24gb": ("sft", 1, 1, "data_parallel", None),
    "qwen2.5-7b-ultrafeedback-sft-8x80gb": ("sft", 1, 8, "fsdp", None),
}
"""Command, nodes, GPUs of each, strategy and engine of each recipe."""


def chat(*said: str) -> list[dict[str, str]]:
    return [{"content": text, "role": role} for text, role in zip(said, ("user", "assistant"), strict=False)]


def card(**configs: dict[str, str]) -> bytes:
    """The head of a card: configurations with the patterns of their splits."""
    rows = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configs.items()
    ]
    return f"---\nconfigs: {json.dumps(rows)}\n---\n# data\n".encode()


GSM8K = {"question": "A pen is $2. What are 3?", "answer": "3 * 2 = <<3*2=6>>6\n#### 6"}
MATH = {"problem": "What is $2^3$?", "level": "Level 1", "solution": r"It is $\boxed{8}$.", "type": "Algebra"}
DAPO = {
    "prompt": "What is 2^3?",
    "solution": "8",
    "data_source": "math_dapo",
    "source_prompt": chat("Solve this. What is 2^3?"),
    "ability": "MATH",
    "reward_model": {"ground_truth": "8", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
ALPACA = {"instruction": "Add them.", "input": "3, 5", "output": "8", "text": "Below is an instruction ..."}
ULTRAFEEDBACK = {
    "prompt": "What is 2^3?",
    "prompt_id": "f0e37e9f",
    "chosen": chat("What is 2^3?", "8"),
    "rejected": chat("What is 2^3?", "9"),
    "messages": chat("What is 2^3?", "8"),
    "score_chosen": 8.5,
    "score_rejected": 3.0,
}
SPLITS = {split: f"data/{split}-*" for split in ("train_prefs", "train_sft", "test_prefs", "test_sft")}
DATA: dict[str, tuple[bytes, list[str], dict[str, Any], tuple[Any, ...]]] = {
    "openai/gsm8k": (
        card(main={"train": "main/train-*", "test": "main/test-*"}, socratic={"train": "socratic/train-*"}),
        ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "socratic/train-0.parquet"],
        GSM8K,
        (GSM8K["question"], GSM8K["answer"]),
    ),
    "DigitalLearningGmbH/MATH-lighteval": (
        card(default={"train": "data/train-*", "test": "data/test-*"}, algebra={"train": "algebra/train-*"}),
        ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "algebra/train-0.parquet"],
        MATH,
        (MATH["problem"], MATH["solution"]),
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        card(all={"train": "all/train-*"}, cn={"train": "cn/train-*"}, en={"train": "en/train-*"}),
        ["all/train-0.parquet", "cn/train-0.parquet", "en/train-00000-of-00001.parquet"],
        DAPO,
        (DAPO["prompt"], DAPO["solution"]),
    ),
    "tatsu-lab/alpaca": (b"", ["data/train-00000-of-00001-a09b74b3.parquet"], ALPACA, ("Add them.\n\n3, 5", "8")),
    "HuggingFaceH4/ultrafeedback_binarized": (
        card(default=SPLITS),
        [f"data/{split}-00000-of-00001.parquet" for split in SPLITS],
        ULTRAFEEDBACK,
        ("What is 2^3?", "8"),
    ),
}
"""By name: its card, its files, one row of its published columns, and (prompt, label or response)."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with every model of the recipes, of which there are no weights, and an empty cache."""
    for name in ("NUM_NODES", "GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    with running_hub() as served:
        ask_in_place_of_the_hub(served, tmp_path, monkeypatch)
        for size, (config, _) in SHAPES.items():
            for kind in ("", "-Instruct"):
                served.add("model", f"Qwen/Qwen2.5-{size}{kind}", {"config.json": json.dumps(config).encode()})
        yield served
    close_session()


def planned(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan.run([name, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_recipe_that_was_not_run_is_planned_here() -> None:
    not_run = [name for name in recipes.names() if recipes.load(name).status]
    assert sorted(not_run) == sorted(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_fits_its_machine_and_divides_evenly(name: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    command, nodes, per_node, strategy, engine = RUNS[name]
    recipe, told = recipes.load(name), planned(name, capsys)
    size = next(size for size in SHAPES if f"-{size.lower()}-" in name)
    assert told["parameters"] == SHAPES[size][1]
    assert (recipe.command, told["nodes"], told["ranks_per_node"]) == (command, nodes, per_node)
    values = resolve(command, ["--config", name]).values
    assert choose_strategy(strategy_settings(values)).name == strategy
    assert values.get("engine_type") == engine
    assert values["use_mp_opt"] or (values["bf16"] and values["lora_rank"]), "no step is lost in 16 bits"
    peak = max(told["training_bytes"], told["rollout_bytes"] if command == "rl" else 0)
    assert told["gpu_memory"] == recipe.machine["gpu_memory"] == (22 if "24gb" in name else 79)
    assert peak <= 0.9 * told["gpu_memory"] * GIB
    assert recipe.memory == f"{peak / GIB:.0f} of {told['gpu_memory']} GiB"
    assert [note for note in told["notes"] if "no effect" in note or "no room" in note] == []
    divide_evenly(told, values, nodes * per_node)


def divide_evenly(told: dict[str, Any], values: dict[str, Any], ranks: int) -> None:
    """Batches of samples and of prompts by ranks and micro-batches, and rollouts by optimizer steps."""
    samples = values["train_batch_size"]
    each = samples // ranks
    micro = min(values["micro_train_batch_size"], each)
    assert samples % (ranks * micro) == 0
    assert f"{samples:,} / {ranks} = {each:,} samples a rank = {each // micro:,} micro-batches" in told["batches"][0]
    if "rollout_batch_size" in values:
        rollout = values["rollout_batch_size"] * values["n_samples_per_prompt"]
        assert rollout % samples == values["rollout_batch_size"] % ranks == 0
        share = next(term["formula"] for term in told["memory"] if term["name"] == "engine's share")
        found = re.search(r"at most ([\d,]+) sequences", share)
        assert found is not None
        assert int(found[1].replace(",", "")) >= 64, "enough at once for a GPU to be busy"


def test_a_plan_fetches_configurations_and_nothing_else(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("model", "Qwen/Qwen2.5-7B-Instruct", {
        "config.json": json.dumps(SHAPES["7B"][0]).encode(),
        "model-00001-of-00002.safetensors": b"w",
        "tokenizer.json": b"{}",
    })  # fmt: skip
    planned("qwen2.5-7b-math-8x80gb", capsys)
    assert sorted(path.rpartition("/")[2] for path in hub.downloads()) == ["config.json", "tokenizer.json"]


def sources(name: str) -> list[tuple[str, str, str]]:
    """(setting, value, split) of the data of a recipe."""
    values = resolve(RUNS[name][0], ["--config", name]).values
    named = [("prompt_data", values["prompt_split"]), ("eval_data", values["eval_split"])]
    return [(setting, values[setting], split) for setting, split in named if values[setting]]


@pytest.mark.parametrize("name", RUNS)
def test_rows_of_the_published_columns_are_read_as_the_recipe_says(name: str, hub: Hub) -> None:
    keys = {key: value for key, value in resolve(RUNS[name][0], ["--config", name]).values.items() if "_key" in key}
    for setting, value, split in sources(name):
        repository = value.partition(":")[0]
        text, files, row, expected = DATA[repository]
        rows = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), rows)
        hub.add("dataset", repository, {"README.md": text} | dict.fromkeys(files, rows.getvalue()))
        hub.requests.clear()
        specs = located_sources(value, split=split, flag=f"--{setting}")
        loaded = load_prompts(
            specs,
            split=split,
            input_key=keys["input_key"],
            label_key=keys.get("label_key"),
            output_key=keys.get("output_key"),
        )
        [prompt] = loaded.prompts
        asked = prompt.text if prompt.messages is None else prompt.messages[-1].as_dict()["content"]
        assert (asked, prompt.label if RUNS[name][0] == "rl" else prompt.output) == expected
        assert [len(spec.files) for spec in specs] == [1]
        assert len([path for path in hub.downloads() if path.endswith(".parquet")]) <= 1, "of one split alone"


def test_the_page_has_a_row_for_every_recipe_with_the_memory_of_its_plan() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    for name in RUNS:
        recipe = recipes.load(name)
        assert recipe.memory in rows[name], name
        assert "not yet run" in PAGE.read_text()
