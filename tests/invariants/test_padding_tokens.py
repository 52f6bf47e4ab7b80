"""Tokens for padding and for the end, in ten configurations: the loss is that of rows without padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM

from rft.build.prompt_data import demonstrations, read_training
from rft_models.policy.load import make_policy
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.packing import pack
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.settings.data import SftDataSettings

EOS = "<eos>"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no padding token": {"pad_token": None},
    "a token of its own": {"pad_token": "<pad>"},
    "the end as padding": {"pad_token": EOS},
    "a token that texts have as padding": {"pad_token": "1"},
    "a token behind the vocabulary as padding": {"pad_token": "<new>"},
    "padding on the left": {"pad_token": "<pad>", "padding_side": "left"},
    "the end as padding on the left": {"pad_token": EOS, "padding_side": "left"},
    "padding as the unknown token": {"pad_token": "<pad>", "unk_token": "<pad>"},
    "a start of texts": {"pad_token": EOS, "bos_token": "<s>"},
    "the start as padding": {"pad_token": "<s>", "bos_token": "<s>"},
}


def tokenizer_of(configuration: dict[str, Any]) -> HfTokenizer:
    tokenizer: Any = build_bpe_tokenizer(["1+1=2"], 258)
    tokens = {name: token for name, token in configuration.items() if name.endswith("token") and token is not None}
    if tokens:
        tokenizer.add_special_tokens(tokens)
    if configuration.get("pad_token") is None:
        tokenizer.pad_token = None
    tokenizer.padding_side = configuration.get("padding_side", "right")
    if "bos_token" in configuration:
        start = (configuration["bos_token"], tokenizer.convert_tokens_to_ids(configuration["bos_token"]))
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start[0]} $A", special_tokens=[start]
        )
    return HfTokenizer(tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    """A decoder with more rows than any of the vocabularies."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", vocab_size=270, **sizes))
    return model.double().eval()


def samples_of(tokenizer: HfTokenizer, folder: Path) -> list[TrainingSample]:
    """Rows of three lengths, the end in the middle of one of them."""
    rows = [("1+1=", "2"), ("10+11=", f"21{EOS}"), ("1+1+1+1+1=", "5 that is")]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": a, "output": b}) + "\n" for a, b in rows))
    settings = SftDataSettings(prompt_data=str(file))
    read = read_training(settings, settings, tokenizer, label_key=None, output_key="output", prompt_max_len=50)
    return list(demonstrations(read.rendered, tokenizer, max_len=60)[0])


def without_padding(model: Any, samples: list[TrainingSample]) -> float:
    """Every row alone, by transformers' own forward: the mean over the tokens behind the prompts."""
    losses: list[float] = []
    for sample in samples:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
        logprobs_TV = logits_TV.log_softmax(-1)
        learned = range(sample.prompt_length, len(sample.token_ids))
        losses += [-float(logprobs_TV[place - 1, sample.token_ids[place]]) for place in learned]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_loss_is_that_of_rows_without_padding(name: str, model: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CONFIGURATIONS[name])
    samples = samples_of(tokenizer, tmp_path)
    assert all(sample.token_ids[-1] == tokenizer.eos_ids[0] for sample in samples), "the end is learned"
    expected = without_padding(model, samples)
    batch = pack(samples)
    for packed in (False, True):
        policy = make_policy(model, tokenizer, packed=packed)
        with torch.no_grad():
            logprobs_T, _ = policy.token_logprobs(batch.tokens)
        assert float(-logprobs_T[batch.loss_mask_T].mean()) == pytest.approx(expected, rel=1e-9), packed
