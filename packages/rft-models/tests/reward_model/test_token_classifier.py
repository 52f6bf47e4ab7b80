"""Token classifiers with two labels: a step's probability is that of label 1 in transformers' own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.errors import DataError, OptionsError
from rft_models.files.directories import checked_model_directory
from rft_models.loading.sequence_classifiers import edit_config
from rft_models.reward_model.loading import load_reward_model, spec_in_files
from rft_models.reward_model.spec import RewardSpec, TokenClassifierSteps
from rft_models.reward_model.step_scorer import StepTextScorer
from rft_models.reward_model.token_classifier import is_token_classifier
from rft_models.tiny_models.text import build_bpe_tokenizer, build_decoder
from rft_models.tokenization.tokenizer import load_tokenizer


def classifier(folder: Path, num_labels: int = 2) -> Path:
    """A token classifier as transformers writes it, with a bias that counts."""
    from transformers import AutoModelForTokenClassification

    tokenizer = build_bpe_tokenizer(["one and one is two\n", "1+1=2\n"], 300)
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 24, "max_positions": 64}
    base = build_decoder(folder / "base", tokenizer, **sizes, seed=2, init_std=0.3)
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, 16 * num_labels).sin().view(num_labels, 16) * 2)
        model.score.bias.copy_(torch.linspace(-1, 1.5, num_labels))
    model.save_pretrained(folder / "prm")
    load_tokenizer(base).save_pretrained(folder / "prm")
    return folder / "prm"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("models"))


def expected(directory: Path, prompt: str, steps: list[str], separator: str = "\n") -> list[float]:
    """The probability of label 1 where TRL's PRMTrainer has the labels."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float32).eval()
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids += tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ends: list[int] = []
    for step in steps:
        ids += tokenizer(step, add_special_tokens=False)["input_ids"]
        ids += tokenizer.encode(separator, add_special_tokens=False)
        ends.append(len(ids) - 1)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1].tolist()


def test_a_step_has_the_probability_of_label_one_at_its_separator(directory: Path) -> None:
    model = load_reward_model(directory)
    assert model.spec == RewardSpec(steps=TokenClassifierSteps())
    found = StepTextScorer(model).score_steps(["1+1+1=", "1?"], [(), ()], [["1+1=2", "2+1=3"], ["one"]])
    for row, (prompt, steps) in zip(found, (("1+1+1=", ["1+1=2", "2+1=3"]), ("1?", ["one"])), strict=True):
        assert torch.tensor(row).sigmoid().tolist() == pytest.approx(expected(directory, prompt, steps), abs=1e-5)
    [conversation] = StepTextScorer(model).score_steps(["rendered"], [({"role": "user", "content": "1?"},)], [["one"]])
    assert conversation == pytest.approx(found[1], abs=1e-5), "of a conversation what it says, without a template"


def test_separator_and_reduction_may_stand_in_the_configuration(directory: Path, tmp_path: Path) -> None:
    path = classifier(tmp_path)
    edit_config(path / "config.json", {"step_separator": "=", "step_reduction": "product"})
    model = load_reward_model(path)
    assert model.spec.steps == TokenClassifierSteps(separator="=", reduction="product")
    [row] = StepTextScorer(model).score_steps(["1+1"], [()], [["one", "2"]])
    assert torch.tensor(row).sigmoid().tolist() == pytest.approx(expected(path, "1+1", ["one", "2"], "="), abs=1e-5)
    edit_config(path / "config.json", {"step_reduction": "most"})
    with pytest.raises(OptionsError, match="most"):
        spec_in_files(*checked_model_directory(path))


def test_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    path = classifier(tmp_path, num_labels=3)
    assert is_token_classifier(json.loads((path / "config.json").read_text()))
    with pytest.raises(DataError) as caught:
        load_reward_model(path)
    assert caught.value.problem.code == "models.token_labels"
    assert "[3, 16]" in caught.value.problem.what
