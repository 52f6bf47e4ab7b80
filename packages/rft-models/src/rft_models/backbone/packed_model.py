"""Base of the policy, the critic and the reward model: a transformers model whose decoder runs on packed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rft_core.errors import OptionsError
from rft_models.attention.varlen import VarlenKernel
from rft_models.backbone.backbone import Backbone
from rft_models.backbone.causality_check import check_states
from rft_models.backbone.image_check import check_image_states
from rft_models.files.directories import no_progress_bars
from rft_models.files.processor_files import keep_processor_files
from rft_models.keyed_masks.keyed_dropout import RowKeys
from rft_models.lora.adapters import Adapters
from rft_models.own_decoder.dropout import key_dropout
from rft_models.vision.tower import vision_tower_of

if TYPE_CHECKING:
    from rft_models.files.safetensors_reader import WeightFiles
    from rft_models.lora.initial_values import PendingLoraWeights
    from rft_models.tokenization.tokenizer import HfTokenizer


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """The last rows of a matrix, which alone are trained, as a parameter that shares the matrix's memory."""

    name: str
    """The optimizer's name of these rows: "matrix[first:]"."""
    first: int
    """The first row that is trained."""
    parameter: nn.Parameter
    hook: RemovableHandle
    """Hands the matrix's gradients over to `parameter`."""


class PackedModel(ABC):
    """A transformers model, its tokenizer, and the way its packed forward is computed.

    `packed` and `kernel` select the way, see `Backbone`; all ways are exact. `where` is the directory that errors name.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: HfTokenizer | None,
        *,
        packed: bool,
        kernel: VarlenKernel | None = None,
        where: str = "model",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.where = where
        self.tower = vision_tower_of(model)
        """Computes the features of images; None: the model takes none."""
        self.backbone = Backbone(self._decoder(), packed=packed, kernel=kernel, tower=self.tower)
        self.adapters: Adapters | None = None
        """Adapters trained in place of the weights, which are then frozen; None = no adapters."""
        self._dropout: RowKeys | None = None
        """Keys of the masks of the model's own dropout; None = there is none, or it is off."""
        self.pending_weights: WeightFiles | PendingLoraWeights | None = None
        """Values of the parameters that have no memory yet (`load_on_meta`); None = all parameters have memory."""
        self.trained_rows: dict[str, TrainedRows] = {}
        """The rows of matrices of which rows alone are trained, by the matrix's name."""

    def _decoder(self) -> Any:
        """Return the part of the model that ends with the last norm."""
        return self.model if self.tower is None else self.model.get_decoder()

    @property
    def packed(self) -> bool:
        """Return true where the decoder runs once on all tokens, with segment-wise attention."""
        return self.backbone.packed

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers in order: what can be gathered, recomputed or placed one at a time."""
        return list(self.backbone.decoder.layers)

    def accepts(self, argument: str) -> bool:
        """Return true where the decoder's forward has an argument of this name."""
        return self.backbone.accepts(argument)

    def gather_always(self) -> None:
        """Use the vision tower for rows without images too: ranks that gather weights together must all use them."""
        if self.tower is not None:
            self.tower.runs_always = True

    def verify(self) -> None:
        """Compare the packed forward with the decoder's own on two segments, and look for states that see later tokens.

        Raises:
            PreflightError: the states differ by more than the weights' precision explains, or a token's state
                depends on tokens behind it.
        """
        known: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "where": self.where}
        check_states(self.backbone.decoder, self.backbone, **known)
        if self.tower is not None:
            check_image_states(self.model, self.backbone, self.tower, **known)

    def key_dropout(self, seed: int) -> None:
        """Let blocks with dropout drop entries where gradients are taken, with masks of this seed; or do nothing.

        Raises:
            OptionsError: ranks share the rows of a sample, from which the masks follow.
        """
        self._dropout = key_dropout(self.model, self.backbone.decoder, seed=seed)
        self.backbone.look_for_dropout()
        if self._dropout is not None and self.backbone.split is not None:
            raise OptionsError(
                code="models.dropout_split",
                what=f"dropout in the blocks of {self.where} with samples that ranks share",
                where=self.where,
                why="the masks follow from whole samples",
                do="--sp_size 1",
            )

    @property
    def has_masks(self) -> bool:
        """Return true where masks of dropout follow from the number of the update."""
        return self.adapters is not None or self._dropout is not None

    def begin_update(self, number: int) -> None:
        """Let the masks of dropout be those of an optimizer step, counted from 0."""
        if self.adapters is not None:
            self.adapters.begin_update(number)
        if self._dropout is not None:
            self._dropout.update = number

    def saved_name(self, name: str) -> str:
        """Return the name that a parameter of `model` has in the saved directory."""
        return name

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by their names in the saved directory; tied matrices appear once."""
        for name, parameter in self.model.named_parameters():
            yield self.saved_name(name), parameter

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the optimizer's parameters: those with a gradient; of a matrix with trained rows, those rows."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                rows = self.trained_rows.get(name)
                yield (name, parameter) if rows is None else (rows.name, rows.parameter)

    def release_trained_rows(self) -> dict[str, int]:
        """Train whole matrices in place of their rows; return the first row that is to be trained of each, by name.

        For an optimizer that steps on shards of the matrices and leaves the rows before as they are: from here on
        `trainable_parameters` yields the matrices, and they keep their gradients.
        """
        released, self.trained_rows = self.trained_rows, {}
        for rows in released.values():
            rows.hook.remove()
        return {name: rows.first for name, rows in released.items()}

    def base_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters without those of adapters, under the names that the model has in files."""
        if self.adapters is not None:
            yield from self.adapters.base_parameters(remove_duplicate=remove_duplicate)
        else:
            yield from self.model.named_parameters(remove_duplicate=remove_duplicate)

    def merged_parameters(self, named: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) as files and engines have them: the parameters, with adapters folded in.

        `named`: the full tensors, as the model names them; None = its parameters are full.
        """
        parameters = self.model.named_parameters() if named is None else named
        yield from parameters if self.adapters is None else self.adapters.merged(parameters)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a complete Hugging Face directory: safetensors weights, configuration, tokenizer."""
        self.snapshot(lambda _, tensor: tensor)(Path(directory))

    @abstractmethod
    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """`save_pretrained` of the weights as they are now: each is copied by `copy(name, tensor)`."""

    def write(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """Write tensors by their names in files, with configuration, tokenizer and image processor."""
        directory.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            self.model.save_pretrained(str(directory), state_dict=tensors)
        self.write_tokenizer(directory)

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer and the files of the image processor, whether this run has read these or not."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
        if self.tower is not None:
            keep_processor_files(self.where, directory)

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied matrices counted once."""
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights of `model`."""
        return next(self.model.parameters()).dtype

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode: dropout as configured, gradient checkpointing if it was requested."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode: no dropout, no checkpointing."""
        return self.train(False)
