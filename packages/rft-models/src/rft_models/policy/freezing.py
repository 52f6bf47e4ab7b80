"""Partial training: parts of the weights frozen by name, or all but the rows of some tokens frozen.

A frozen tensor requires no gradient, so that it is in no optimizer: neither a step nor weight decay reaches it.
Rows are trained through parameters of their own that share the matrix's memory. The matrix itself is in no
optimizer; its gradient is cut down to the rows when it arrives. So the other rows have no moments, no decay, and the
same bits for ever, and every path that reads the matrix (embedding, head, engine, saving) sees the trained rows.
Where ranks divide the matrices, the optimizer steps on the rows in each rank's shard (`release_trained_rows`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_models.backbone.packed_model import PackedModel, TrainedRows
from rft_models.loading.transformers_loading import model_without_weights
from rft_models.settings import freezing_refusal

_PARTS = ("visual", "vision_tower", "multi_modal_projector", "language_model")
"""Parts of vision-language models, which may be named without the "model." before them."""
_NEAR = 5
"""Names that an error suggests."""


@dataclass(frozen=True, slots=True)
class FreezeRules:
    """Configuration of the frozen and the trained parts; the default freezes nothing.

    Example: `FreezeRules(prefixes=("model.embed_tokens", "model.layers.0"))`.
    """

    prefixes: tuple[str, ...] = ()
    """Parameters of these names, or below them, are frozen: "model.layers.1" is not "model.layers.10"."""
    train_only_tokens_from: int = -1
    """Only the rows of tokens with this id or a higher one are trained, in the embedding and the output matrix."""

    def __post_init__(self) -> None:
        prefixes = ",".join(self.prefixes)
        refusal = freezing_refusal(prefixes, self.train_only_tokens_from)
        if refusal is not None:
            raise refusal.as_error({"freeze_prefix": prefixes, "train_only_tokens_from": self.train_only_tokens_from})

    @classmethod
    def of(cls, prefixes: str, train_only_tokens_from: int = -1) -> FreezeRules:
        """Parse prefixes joined by commas."""
        parts = (part.strip() for part in prefixes.split(","))
        return cls(tuple(part for part in parts if part), train_only_tokens_from)

    @property
    def freezes(self) -> bool:
        """Return true where these rules freeze anything."""
        return bool(self.prefixes) or self.train_only_tokens_from >= 0


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Frozen tensors and trained rows of a model, with their numbers of weights."""

    tensors: dict[str, int]
    """Number of weights of each wholly frozen tensor, by name."""
    rows: dict[str, tuple[int, int, int]]
    """(first trained row, number of rows, row length) of each matrix of which rows are trained."""
    num_trained: int
    """Weights that are trained."""
    num_weights: int
    """Weights of the model, tied matrices counted once."""
    trained: tuple[str, ...]
    """Names of what an optimizer steps on, as of `PackedModel.trainable_parameters`."""

    def tensors_by_pattern(self) -> dict[str, int]:
        """Return weights by names that cover all layers, as `model.layers.[0-11].mlp.up_proj.weight`."""
        return _by_pattern(self.tensors)


def freeze(policy: PackedModel, rules: FreezeRules) -> FreezeReport:
    """Leave parts untrained, once and before an optimizer is made; return what is trained and what is not.

    Raises:
        OptionsError: a prefix that no parameter has, rows beyond the vocabulary, or nothing left to train.
    """
    assert not policy.trained_rows, "rows were chosen already"
    report, rows = _freeze_parameters(policy.model, rules, policy.where)
    policy.trained_rows.update(rows)
    return report


def train_rows(name: str, weight: nn.Parameter, first: int) -> TrainedRows:
    """Train the rows of `weight` from `first` on; its gradients go there and are dropped elsewhere."""
    rows = nn.Parameter(weight.detach()[first:])
    weight.requires_grad_(True)  # autograd must reach the matrix; the hook keeps the gradient of the rows only
    hook = weight.register_post_accumulate_grad_hook(partial(_move_gradient, rows, first))
    return TrainedRows(f"{name}[{first}:]", first, rows, hook)


def _freeze_parameters(model: Any, rules: FreezeRules, where: str) -> tuple[FreezeReport, dict[str, TrainedRows]]:
    """Freeze parameters of a transformers model in place.

    Raises:
        OptionsError: a prefix that no parameter has, rows beyond the vocabulary, or nothing left to train.
    """
    rows: dict[str, TrainedRows] = {}
    if rules.train_only_tokens_from >= 0:
        rows = _freeze_all_but_rows(model, rules.train_only_tokens_from, where)
    for parameter in _matching(model, rules.prefixes, where):
        parameter.requires_grad_(False)
    report = _describe(model, rows)
    if report.num_trained == 0:
        raise OptionsError(
            code="freezing.nothing_trained",
            what=f"nothing to train: 0 of {report.num_weights:,} weights require gradients",
            where=where,
            why=f"freeze_prefix {','.join(rules.prefixes)} covers all {len(report.tensors)} tensors",
            do="--freeze_prefix with fewer names",
        )
    return report, rows


def preview(directory: str | Path, rules: FreezeRules) -> FreezeReport:
    """Report what `freeze` would do with the model in a directory, from its configuration and without its weights."""
    return _freeze_parameters(model_without_weights(directory), rules, str(directory))[0]


def _freeze_all_but_rows(model: Any, first: int, where: str) -> dict[str, TrainedRows]:
    matrices = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    vocabulary = min(int(matrix.shape[0]) for matrix in matrices)
    if first >= vocabulary:
        raise OptionsError(
            code="freezing.no_new_tokens",
            what=f"train_only_tokens_from = {first:,}, but the model's matrices have rows 0 to {vocabulary - 1:,}",
            where=where,
            why="no row would be trained: the model has no token with this id or a higher one",
            do="give the id of the first new token, after extending the model and its tokenizer",
        )
    model.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = ((names[id(matrix)], matrix) for matrix in dict.fromkeys(matrices))  # tied: once
    return {name: train_rows(name, matrix, first) for name, matrix in named}


def _matching(model: Any, prefixes: Sequence[str], where: str) -> Iterator[nn.Parameter]:
    """Yield the parameters below each prefix; a tied matrix is found under both of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        stem = prefix.rstrip(".")
        matches = next((below for name in names_of(stem) if (below := _below(name, named))), [])
        if not matches:
            raise OptionsError(
                code="freezing.no_such_parameter",
                what=f"freeze_prefix {prefix!r} matches none of the {len(named)} parameter names",
                where=where,
                why="the names are those of the loaded model; similar ones: " + ", ".join(_near(stem, named)),
                do=f"--freeze_prefix {_near(stem, named)[0]}",
            )
        yield from matches


def names_of(stem: str) -> list[str]:
    """Return the name itself, then others that a part of a vision-language model has; "visual" is any model's tower."""
    names = [stem]
    if stem.split(".")[0] in _PARTS:
        names.append(f"model.{stem}")
    return [*names, "model.vision_tower"] if stem == "visual" else names


def _below(stem: str, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for name, parameter in named.items() if name == stem or name.startswith(f"{stem}.")]


def _near(prefix: str, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """Return names and beginnings of names that may have been meant, the likeliest first."""
    known = dict.fromkeys(".".join(parts[:end]) for parts in (n.split(".") for n in names) for end in range(1, 9))
    wanted = prefix.split(".")[-1]
    inside = [name for name in known if name.split(".")[-1] == wanted]
    alike = nearest_names(prefix, known, count=_NEAR, cutoff=0.5)
    tops = sorted(known, key=lambda name: name.count("."))
    return list(dict.fromkeys([*inside, *alike, *tops]))[:_NEAR]


def _describe(model: Any, rows: Mapping[str, TrainedRows]) -> FreezeReport:
    named = dict(model.named_parameters())
    parts = {name: each.parameter for name, each in rows.items()}
    trained = {name: weight.numel() for name, weight in (named | parts).items() if named[name].requires_grad}
    return FreezeReport(
        tensors={name: parameter.numel() for name, parameter in named.items() if name not in trained},
        rows={name: (rows[name].first, part.shape[0], part.shape[1]) for name, part in parts.items()},
        num_trained=sum(trained.values()),
        num_weights=sum(parameter.numel() for parameter in named.values()),
        trained=tuple(rows[name].name if name in rows else name for name in trained),
    )


def _move_gradient(rows: nn.Parameter, first: int, weight: Tensor) -> None:
    assert weight.grad is not None
    part = weight.grad[first:]
    # a copy: a view would keep the gradient of the whole matrix alive
    rows.grad = part.clone() if rows.grad is None else rows.grad.add_(part)
    weight.grad = None  # no optimizer has the matrix, and its gradient would hold memory for every row


def _by_pattern(tensors: dict[str, int]) -> dict[str, int]:
    """Weights of tensors whose names differ in one layer number, as `model.layers.[0-11].mlp.up_proj.weight`."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, count in tensors.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if number is None else f"{name[: number.start()]}*{name[number.end() :]}"
        groups.setdefault(pattern, []).append((-1 if number is None else int(number[0]), count))
    return {
        pattern.replace("*", _ranges([n for n, _ in members]), 1): sum(count for _, count in members)
        for pattern, members in groups.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "[0-2,5]"; one number as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else f"[{text}]"
