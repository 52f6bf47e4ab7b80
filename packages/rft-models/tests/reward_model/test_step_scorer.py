"""Scores of steps: the same packed as alone, unmoved by what follows, and read back from a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_models.reward_model.loading import load_reward_model, new_reward_model
from rft_models.reward_model.spec import RewardSpec, StepSpec
from rft_models.reward_model.step_scorer import StepTextScorer
from rft_models.tiny_models.text import build_bpe_tokenizer, build_decoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_bpe_tokenizer(["one and one is two\n", "1+1=2\n"], 300)
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 24, "max_positions": 64}
    return build_decoder(tmp_path_factory.mktemp("models") / "m", tokenizer, **sizes, seed=2, init_std=0.3)


def test_a_step_has_one_score_whatever_it_is_packed_with_or_followed_by(directory: Path) -> None:
    spec = RewardSpec(steps=StepSpec(reduction="last"))
    scorer = StepTextScorer(new_reward_model(directory, spec, seed=5))
    responses = ["1+1=2\n2+1=3", "1+1=2\n2+1=3\n3+2=5\n", "1+1=2"]
    together = scorer.score_responses(["1+1+1="] * 3, [()] * 3, responses)
    ends = [[end for end, _ in row] for row in together if not isinstance(row, str)]
    assert ends == [[6, 11], [6, 12, 18], [5]]
    alone = [scorer.score_responses(["1+1+1="], [()], [response])[0] for response in responses]
    logits = [[score for _, score in row] for row in together if not isinstance(row, str)]
    for row, one in zip(logits, alone, strict=True):
        assert row == pytest.approx([score for _, score in one if not isinstance(one, str)], abs=1e-5)
    assert logits[0] == pytest.approx(logits[1][:2], abs=1e-5), "nothing behind a step changes its score"
    assert logits[1][0] != pytest.approx(logits[1][1], abs=1e-4)


def test_a_text_that_cannot_be_scored_says_why(directory: Path) -> None:
    scorer = StepTextScorer(new_reward_model(directory, RewardSpec(steps=StepSpec()), seed=5))
    found = scorer.score_responses(["1?"] * 2, [()] * 2, ["\n", "1+1=2 " * 40])
    assert found[0] == "the response has no step"
    assert isinstance(found[1], str)
    assert found[1].endswith("tokens, but the reward model takes at most 64")


def test_a_saved_model_knows_its_separator_and_reduction(directory: Path, tmp_path: Path) -> None:
    spec = RewardSpec(steps=StepSpec(separator=";", reduction="product"))
    model = new_reward_model(directory, spec, seed=5)
    model.save_pretrained(tmp_path / "saved")
    loaded = load_reward_model(tmp_path / "saved")
    assert loaded.spec == spec
    given = (["1?"], [()], ["1+1=2;3"])
    (again,), (first,) = (StepTextScorer(one).score_responses(*given) for one in (loaded, model))
    assert [place for place, _ in again] == [place for place, _ in first]
    # a product's last bits depend on where its operands lie in memory
    assert [score for _, score in again] == pytest.approx([score for _, score in first], abs=1e-6)
