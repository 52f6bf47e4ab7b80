"""Hugging Face directories <-> reward models.

A plain head (the last token's state, see `RewardSpec.is_classifier`) is stored as transformers stores a sequence
classifier: the decoder under its prefix, "score.weight" [K, D], the class in `architectures`, the heads in
`id2label`. Any other head is stored beside a decoder alone, in tensors that begin with "reward_head.", so that
nothing loads it and computes something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import DataError
from rft_models.attention.kernels import choose_attention
from rft_models.attention.varlen import VarlenKernel
from rft_models.families.vision import is_vision, text_type
from rft_models.files.directories import checked_model_directory, missing_weights, no_load_report
from rft_models.files.head_tensors import refuse_bias, stored_tensor
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.sequence_classifiers import HEAD, has_no_token_head
from rft_models.loading.transformers_loading import (
    Attention,
    choose_packed,
    load_model,
    native_attention,
    prepare,
    refuse_other_kinds,
)
from rft_models.reward_model.head import ScoreHead, new_head
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.spec import RECORD, RewardSpec, spec_of_classifier, stored_spec
from rft_models.reward_model.token_classifier import is_token_classifier, token_classifier_head, token_classifier_spec
from rft_models.reward_model.truncated_decoder import truncate_decoder
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.processor import load_processor


def load_reward_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: Attention = "auto",
    flash_attn: bool = False,
    gradient_checkpointing: Checkpointing | bool | None = None,
) -> RewardModel:
    """Load the reward model in a directory: one that was written here, or a classifier of transformers.

    A sequence classifier scores whole responses, a token classifier with two labels their steps.

    Of a vision-language architecture it is a model with a tensor "score.weight", as such classifiers name it.

    In eval mode; its parameters require gradients. `dtype`, `device`, `attention`, `flash_attn` and
    `gradient_checkpointing` are as for `load_policy`; the head keeps float32.

    Raises:
        DataError: directory, configuration, weights or tokenizer absent, damaged or of another kind; no head.
        PreflightError: the architecture computes something that is not known here, or its states see later tokens.
    """
    path, config = checked_model_directory(source)
    spec = spec_in_files(path, config)
    head = read_head(path, spec)
    tokenizer = load_processor(path)
    model = _decoder(path, config, dtype, device)
    packed = choose_packed(config["model_type"], attention, path, text_type=text_type(config))
    kernel = choose_attention(device, dtype, flash_attn=flash_attn).kernel
    return make_reward_model(
        model,
        head,
        tokenizer,
        packed=packed,
        kernel=kernel,
        gradient_checkpointing=gradient_checkpointing,
        where=str(path),
    )


def new_reward_model(
    source: str | Path,
    spec: RewardSpec,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: Attention = "auto",
    flash_attn: bool = False,
    gradient_checkpointing: Checkpointing | bool | None = None,
) -> RewardModel:
    """Build a reward model to train: a causal or vision-language model without its output matrix, and a new head.

    Raises as `load_reward_model`; `OptionsError` for a layer that is not there.
    """
    path, config = checked_model_directory(source)
    tokenizer = load_processor(path)
    model = _decoder(path, config, dtype, device)
    head = new_head(spec, model.config.get_text_config(decoder=True).hidden_size, seed=seed)
    packed = choose_packed(config["model_type"], attention, path, text_type=text_type(config))
    kernel = choose_attention(device, dtype, flash_attn=flash_attn).kernel
    return make_reward_model(
        model,
        head,
        tokenizer,
        packed=packed,
        kernel=kernel,
        gradient_checkpointing=gradient_checkpointing,
        where=str(path),
    )


def make_reward_model(
    model: Any,
    head: ScoreHead,
    tokenizer: HfTokenizer | None = None,
    *,
    packed: bool,
    kernel: VarlenKernel | None = None,
    gradient_checkpointing: Checkpointing | bool | None = None,
    where: str = "model",
) -> RewardModel:
    """Build a reward model from a transformers decoder in memory and a head; checks its forward."""
    # layers go first: what is switched and compared with its own forward below is the model that stays
    if head.spec.layer is not None:
        truncate_decoder(model.get_decoder() if is_vision(model.config.model_type) else model, head.spec.layer, where)
    prepare(model, packed=packed, gradient_checkpointing=gradient_checkpointing)
    weight = next(model.parameters())
    head.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    made = RewardModel(model, head.eval(), tokenizer, packed=packed, kernel=kernel, where=where)
    made.verify()
    return made


def spec_in_files(path: Path, config: dict[str, Any]) -> RewardSpec:
    """Read the spec of the head in a checked directory; needs no transformers where the spec was written here.

    A token classifier of two labels is a step reward model.

    Raises:
        DataError: there is no head for scores.
    """
    stored = stored_spec(config, path)
    if stored is not None:
        return stored
    if is_token_classifier(config):
        return token_classifier_spec(path, config)
    weight_KD = stored_tensor(path, f"{HEAD}.weight")
    if weight_KD is None or weight_KD.dim() != 2:
        raise DataError(
            code="models.no_reward_head",
            what=f"{path} has no head for scores: no {RECORD} in config.json and no tensor {HEAD}.weight",
            where=str(path),
            why="a reward model is a sequence classifier (...ForSequenceClassification), or was written here",
            do="use a reward model's directory; a language model judges with --judge_pretrain",
        )
    refuse_bias(path, HEAD)
    return spec_of_classifier(config, weight_KD.shape[0])


def weighted_head(path: Path, config: dict[str, Any]) -> Tensor | None:
    """[1, D]: the one row whose product with the last state is the reward, where several plain heads make it up.

    None where the files hold no such heads, or no weight of each.
    """
    spec = stored_spec(config, path)
    if spec is None or not spec.is_classifier or spec.weights is None:
        return None
    weight_KD = stored_tensor(path, f"{HEAD}.weight")
    if weight_KD is None:
        return None
    weights_K = torch.tensor(spec.weights, dtype=weight_KD.dtype)
    # heads are linear and have no bias, so their weighted sum is one head
    return (weights_K @ weight_KD)[None]


def _decoder(path: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str) -> Any:
    bare = has_no_token_head(config) or is_token_classifier(config) or is_vision(config.get("model_type", ""))
    refuse_other_kinds(path, {**config, "architectures": []} if bare else config, takes_images=True)
    with no_load_report():
        model = load_model(path, dtype, native_attention(config), auto_class="AutoModel")
    return model.to(device)


def read_head(path: Path, spec: RewardSpec) -> ScoreHead:
    """Read the head's tensors, as they stand in the files.

    Raises:
        DataError: a tensor is not there, or there are others than one row a head.
    """
    if spec.steps is not None and spec.steps.is_of_token_classifier:
        return token_classifier_head(path, spec)
    weight_KD = _required(path, f"{spec.tensor_prefix}{HEAD}.weight")
    if weight_KD.shape[0] != len(spec.heads):
        raise DataError(
            code="models.reward_head_shape",
            what=f"{HEAD}.weight has {weight_KD.shape[0]} rows for the heads {', '.join(spec.heads)}",
            where=str(path),
            why="each head needs one row",
            do=f"copy config.json and the *.safetensors of the model into {path} again",
        )
    head = ScoreHead(spec, weight_KD)
    names = [name for name in head.state_dict() if name != f"{HEAD}.weight"]
    # not strict: the weight is in already
    head.load_state_dict({name: _required(path, f"{spec.tensor_prefix}{name}") for name in names}, strict=False)
    return head


def _required(path: Path, name: str) -> Tensor:
    tensor = stored_tensor(path, name)
    if tensor is None:
        raise missing_weights(path, f"the head's tensor {name} is not in the files")
    return tensor
