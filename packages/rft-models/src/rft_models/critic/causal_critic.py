"""A causal decoder with a value head: packed tokens in, estimates of the return out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.kernels import choose_attention
from rft_models.attention.varlen import VarlenKernel
from rft_models.backbone.packed_model import PackedModel
from rft_models.critic.value_head import checked_prefix, initial_head, stored_head, value_head
from rft_models.families.vision import text_type
from rft_models.files.directories import checked_model_directory, no_load_report
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.sequence_classifiers import HEAD, classifiers, edit_config, has_no_token_head
from rft_models.loading.transformers_loading import (
    Attention,
    choose_packed,
    load_model,
    native_attention,
    prepare,
    refuse_other_kinds,
)
from rft_models.reward_model.loading import weighted_head
from rft_models.reward_model.spec import RECORD
from rft_models.vision.processor import load_processor

if TYPE_CHECKING:
    from rft_models.tokenization.tokenizer import HfTokenizer


class CausalCritic(PackedModel):
    """A transformers decoder, a linear layer without bias from its hidden states to one number, and a tokenizer.

    The head is computed in float32 (float64 for float64 weights), whatever the decoder's type: a value is
    compared with returns, and bfloat16 has three digits. `head_was_loaded` is true where it came from a file.
    """

    def __init__(
        self,
        model: Any,
        head: nn.Linear,
        tokenizer: HfTokenizer | None,
        *,
        packed: bool,
        head_prefix: str = "score",
        head_was_loaded: bool = False,
        kernel: VarlenKernel | None = None,
        where: str = "model",
    ) -> None:
        super().__init__(model, tokenizer, packed=packed, kernel=kernel, where=where)
        self.head = head
        self.head_prefix = head_prefix
        self.head_was_loaded = head_was_loaded

    def values(self, tokens: PackedTokens) -> Tensor:
        """V(tokens of the segment before token t), the estimate before token t is sampled, aligned with its log-prob.

        That is the head on the state of token t - 1. The value after the last token is not among them. A
        prompt (what stands before the first target of a segment) that neighbouring segments share runs once.

        Returns:
            [T] float32 (float64 for float64 weights), differentiable; 0 at the first token of a segment and at tokens
            that are no targets.
        """
        states = self.backbone.states(tokens)
        after_T = self.head(states.hidden_KD.to(self.head.weight.dtype))[:, 0]
        after_T = self.backbone.all_rows(after_T, states)
        after_T = after_T if states.place_T is None else after_T.index_select(0, states.place_T)
        # the state of token t - 1 gives the value before token t
        return torch.where(tokens.targets_T, after_T.roll(1), 0.0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by their names in the saved directory."""
        yield from super().named_parameters()
        yield from self.head.named_parameters(self.head_prefix)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a complete Hugging Face directory; with the prefix "score" a sequence classifier with one label."""
        super().save_pretrained(directory)

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """`save_pretrained` of the weights as they are now: each is copied by `copy(name, tensor)`."""
        merged = self.merged_parameters(self.model.state_dict().items())
        named = {self.saved_name(name): tensor for name, tensor in merged}
        named[f"{self.head_prefix}.weight"] = self.head.weight.detach()
        tensors = {name: copy(name, tensor) for name, tensor in named.items()}

        def write(directory: Path) -> None:
            # transformers makes the classifier's head of this size when it reads the directory
            self.model.config.num_labels = 1
            self.write(directory, tensors)
            self._name_the_classifier(directory / "config.json")

        return write

    def saved_name(self, name: str) -> str:
        """Return the name in files of a decoder's parameter: with the prefix that causal language models' files have.

        The decoder of a vision-language model has no prefix: transformers has no classifier around one, and its
        older names begin alike.
        """
        prefix = self.model.base_model_prefix if self.tower is None else ""
        return f"{prefix}.{name}" if prefix else name

    def _name_the_classifier(self, file: Path) -> None:
        classifier = classifiers().get(self.model.config.model_type)
        if classifier is not None and self.head_prefix == HEAD:
            edit_config(file, {"architectures": [classifier]})

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode: dropout as configured, gradient checkpointing if it was requested."""
        self.head.train(mode)
        return super().train(mode)


def load_critic(
    source: str | Path,
    *,
    head_prefix: str = "score",
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gradient_checkpointing: Checkpointing | bool | None = None,
    attention: Attention = "auto",
    flash_attn: bool = False,
    tokenizer: HfTokenizer | None = None,
) -> CausalCritic:
    """Load a critic in eval mode from a causal or vision-language model, a saved critic, or a one-label classifier.

    A head for tokens that is in the files is not read. The value head is the tensor "<head_prefix>.weight"
    where the files hold one (of a reward model with several weighted heads their sum), otherwise it is drawn;
    `head_was_loaded` is true in the first case.

    Args:
        source: a Hugging Face model directory (config.json, *.safetensors, tokenizer files).
        head_prefix: name of the value head in the files, read and written.
        seed: what a new head is drawn from.
        dtype: type of the decoder's weights.
        device: where the weights go.
        gradient_checkpointing: as for `load_policy`.
        attention: as for `load_policy`.
        flash_attn: as for `load_policy`.
        tokenizer: a tokenizer that was loaded already (of a model that takes images an `HfProcessor`).

    Raises:
        DataError: directory, configuration, weights or tokenizer absent, damaged or of another kind; a tensor
            of the head's name that is no value head.
        OptionsError: a prefix that cannot name a tensor; attention="packed" for an architecture without it.
        PreflightError: the architecture computes something that is not known here, or its states see later tokens.
    """
    checked_prefix(head_prefix)
    path, config = checked_model_directory(source)
    # a decoder alone or under a classifier is no causal class by name: its model_type decides
    named = {**config, "architectures": []} if has_no_token_head(config) else config
    refuse_other_kinds(path, named, takes_images=True)
    tokenizer = tokenizer if tokenizer is not None else load_processor(path)
    packed = choose_packed(config["model_type"], attention, path, text_type=text_type(config))
    with no_load_report():
        model = load_model(path, dtype, native_attention(config), auto_class="AutoModel")
    vars(model.config).pop(RECORD, None)  # a critic has one head, and none of a reward model's other parts
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    head_1D = weighted_head(path, config) if head_prefix == HEAD else None
    head_1D = stored_head(path, head_prefix, hidden_size) if head_1D is None else head_1D
    model.to(device)
    return make_critic(
        model,
        initial_head(hidden_size, seed=seed) if head_1D is None else head_1D,
        tokenizer,
        packed=packed,
        head_prefix=head_prefix,
        head_was_loaded=head_1D is not None,
        gradient_checkpointing=gradient_checkpointing,
        kernel=choose_attention(device, dtype, flash_attn=flash_attn).kernel,
        where=str(path),
    )


def make_critic(
    model: Any,
    head_1D: Tensor,
    tokenizer: HfTokenizer | None = None,
    *,
    packed: bool,
    head_prefix: str = "score",
    head_was_loaded: bool = False,
    gradient_checkpointing: Checkpointing | bool | None = None,
    kernel: VarlenKernel | None = None,
    where: str = "model",
) -> CausalCritic:
    """Build a critic from a transformers decoder in memory and a head of [1, hidden]; checks its forward."""
    prepare(model, packed=packed, gradient_checkpointing=gradient_checkpointing)
    weight = next(model.parameters())
    head = value_head(head_1D.to(weight.device, torch.promote_types(weight.dtype, torch.float32)))
    critic = CausalCritic(
        model,
        head.eval(),
        tokenizer,
        packed=packed,
        head_prefix=head_prefix,
        head_was_loaded=head_was_loaded,
        kernel=kernel,
        where=where,
    )
    critic.verify()
    return critic
