"""An inference engine is added by one file and one row of the registry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from rft.build.engines import choose_engine, engine_check, make_engine
from rft.config.errors import SettingsError
from rft.process.machine import Machine
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_cli.config.resolve import resolve
from rft_dist.collectives import SingleProcess
from rft_dist.launch.process_group import ranks_from_environment
from rft_engine.registry import ENGINES, EngineCapabilities, EngineKind, EngineLimit
from rft_engine.settings import AUTO, DecodingEngineSettings, EngineType
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model
from rft_trainer.records.rollouts import Prompt
from rft_trainer.rollouts.collector import sample_responses

FILE = '''
"""Greedy decoding, one sample at a time."""

import torch

from rft_engine.completions import Completion
from rft_engine.engine_base import EngineBase


class GreedyEngine(EngineBase):
    def __init__(self, decoder):
        super().__init__()
        self._decoder = decoder

    def generate(self, prompts, sample_keys, options, *, budgets=None, constraint=None, media=None):
        return [[self._one(list(p), options) for _ in keys] for p, keys in zip(prompts, sample_keys, strict=True)]

    @torch.inference_mode()
    def _one(self, prompt, options):
        cache = self._decoder.new_cache(1, len(prompt) + options.max_new_tokens)
        logits = self._decoder.prefill(cache, torch.tensor([prompt]), torch.tensor([len(prompt)]), [1])
        tokens, logprobs = [], []
        while True:
            tokens.append(int(logits[0].argmax()))
            logprobs.append(float(logits[0].log_softmax(-1).max()))
            if tokens[-1] in options.stop_token_ids or len(tokens) == options.max_new_tokens:
                break
            logits = self._decoder.step(cache, torch.tensor([tokens[-1]]))
        reason = "stop" if tokens[-1] in options.stop_token_ids else "length"
        return Completion(tuple(tokens), tuple(logprobs), (0.0,) * len(tokens), reason, self.weight_version)

    def load_weights(self, version):
        self._states.load_weights(version)
        self._decoder.refresh()


def build(request):
    return GreedyEngine(request.model.decoder(graphs=False))
'''

ROW = EngineKind(
    name="greedy",
    title="the greedy engine",
    summary="in this process, one sample at a time",
    builder="greedy_engine:build",
    can=EngineCapabilities(shares_weights=True, supports_images=False, supports_sharded_policy=False),
    limits=(
        EngineLimit(
            code="engine.greedy.temperature",
            settings=("temperature", "engine_type"),
            applies=lambda values: values.get("temperature", 0.0) != 0.0,
            why="this engine takes the likeliest token",
            remedy="--temperature 0",
        ),
    ),
)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineKind:
    (tmp_path / "greedy_engine.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "greedy_engine", raising=False)
    monkeypatch.setitem(ENGINES, ROW.name, ROW)
    return ROW


def test_an_engine_of_one_file_and_one_row_generates_as_those_of_a_run_do(added: EngineKind, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = load_policy(build_character_model(tmp_path / "m", hidden=32, heads=4, ffn=48)).eval()
    tokenizer: Any = policy.tokenizer
    machine = Machine("cpu", ranks_from_environment({}), SingleProcess())
    prompts = [
        Prompt(f"p{i}", tuple(tokenizer.encode(text)), text, None, "t") for i, text in enumerate(("1+1=", "12+3="))
    ]
    options = SamplingOptions(temperature=0.0, max_new_tokens=6, stop_token_ids=tokenizer.eos_ids)
    drawn = []
    for name in (added.name, "native"):
        settings = DecodingEngineSettings(engine_type=name)
        assert choose_engine(settings, "cpu").can is ENGINES[name].can
        engine = make_engine(settings, machine, policy, policy.where, 32)
        engine.load_weights(1)
        assert engine_check(settings, machine, policy, engine) is None, "it shares the weights"
        drawn.append(sample_responses(engine, tokenizer, prompts, [[0], [0, 1]], options))
    ours, native = drawn
    assert [[one.completion_ids for one in group] for group in ours] == [
        [one.completion_ids for one in group] for group in native
    ]
    for group, other in zip(ours, native, strict=True):
        for one, same in zip(group, other, strict=True):
            assert one.behaviour_logprobs == pytest.approx(same.behaviour_logprobs, abs=1e-4)
            assert (one.finish_reason, one.weight_version) == (same.finish_reason, 1)


def test_the_words_of_the_flag_are_the_rows_of_the_registry() -> None:
    assert get_args(EngineType) == (AUTO, *ENGINES)


def test_the_rules_ask_the_row(added: EngineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stands under a word that the flag has already: its words are read when the program starts."""
    monkeypatch.setitem(ENGINES, "hf", added)
    words = ["--pretrain", "m", "--engine_type", "hf"]
    with pytest.raises(SettingsError) as caught:
        resolve("rl", [*words, "--images_key", "image", "--fsdp"])
    codes = {problem.code for problem in caught.value.problems}
    assert {"engine.greedy.temperature", "engine.greedy.images", "strategy.hf"} <= codes
