"""A model family and a patch in a file of a person's own: what the documentation shows is the file, and it trains."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.compare import differing_tensors
from support.trainer_task import TrainerTask

from rft_cli.main import main
from rft_models.families import custom, patches, registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_model.py"
PAGE = (ROOT / "docs" / "custom-models.md").read_text()

pytestmark = pytest.mark.xdist_group("custom_model")


def block(name: str, end: str) -> str:
    """The code between two marks of the page."""
    (found,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- {end} -->", PAGE, flags=re.S)
    return found


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patches, "_PATCHES", {})
    monkeypatch.setattr(custom, "_FROM_FILES", {})
    monkeypatch.setattr(registry, "CUSTOM_FAMILIES", {})
    yield
    transformers: Any = importlib.import_module("transformers")
    transformers.CONFIG_MAPPING._extra_content.pop("toy", None)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file, imported as a person would."""
    spec = importlib.util.spec_from_file_location("my_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_model", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_example_as_it_is() -> None:
    assert block("file: examples/my_model.py", "end of file") == EXAMPLE.read_text()


def test_the_test_of_the_page_passes(example: ModuleType) -> None:
    scope: dict[str, Any] = {}
    exec(compile(block("checked: test", "end of test"), "test_my_model.py", "exec"), scope)
    (test,) = [value for name, value in scope.items() if name.startswith("test_")]
    test()
    assert registry.packs("toy"), "it is the example of the page that it has tested"


def test_the_example_registers_what_the_page_says(example: ModuleType) -> None:
    assert registry.packs("toy")
    assert patches.registered_patches("qwen2") == (example.patch_your_model,)


def file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in a model directory."""
    return importlib.import_module("safetensors.torch").load_file(directory / "model.safetensors")


def toy_directory(example: Any, source: Path, target: Path) -> Path:
    """The task's model directory with a toy of the same vocabulary in its place."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = example.ToyConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    example.ToyForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def test_a_run_on_the_family_trains_it_and_its_checkpoint_is_evaluated(
    example: ModuleType, trainer_task: TrainerTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy_directory(example, trainer_task.folder / "model", tmp_path / "toy")
    run = tmp_path / "run"
    words = [*trainer_task.words(), "--pretrain", str(model), "--model_code", str(EXAMPLE), "--save_path", str(run)]
    assert main(["rl", *words]) == 0
    trained = max((run / "checkpoints").glob("step_*")) / "model"
    assert json.loads((trained / "config.json").read_text())["architectures"] == ["ToyForCausalLM"]
    assert len(differing_tensors(*(file_tensors(path) for path in (model, trained)))) > 10
    capsys.readouterr()
    assert main(["eval", str(run), "--json_errors"]) == 0, "the run's own model code is used again"


def test_without_the_file_the_family_is_refused_with_the_flag(
    example: ModuleType, trainer_task: TrainerTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy_directory(example, trainer_task.folder / "model", tmp_path / "toy")
    transformers: Any = importlib.import_module("transformers")
    transformers.CONFIG_MAPPING._extra_content.pop("toy")
    registry.CUSTOM_FAMILIES.clear()
    words = [*trainer_task.words(), "--pretrain", str(model), "--save_path", str(tmp_path / "run"), "--json_errors"]
    assert main(["rl", *words]) == 4
    assert "--model_code" in capsys.readouterr().err
