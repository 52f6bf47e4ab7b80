"""Low-rank adapters inside a model: peft's layers with values from a seed, known by the names of files.

    y = W x + s B A x,    A [r, in] drawn, B [out, r] zero at the start, s = alpha / r (rslora: alpha / sqrt(r))

Hu et al. 2021 (arXiv 2106.09685); rsLoRA: Kalajdzievski 2023 (arXiv 2312.03732); DoRA: Liu et al. 2024
(arXiv 2402.09353), which also trains the length of every row of W + s B A. W is not trained. Adapters are held in
float32 whatever W is held in, since their updates are small beside the last bit of bfloat16.

Inside the model a layer `x.q_proj` becomes `x.q_proj.base_layer` with `x.q_proj.lora_A.default` beside it. Outside
(files, engines, a run's parts) there are two views: the model's own names with the adapters folded in (`merged`), and
the adapters alone under peft's names of files (`tensors`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import DataError, OptionsError, PreflightError, install_command
from rft_core.keyed_random import derive_key
from rft_core.packed_tokens import PackedTokens
from rft_models.keyed_masks.keyed_dropout import KeyedDropout, RowKeys
from rft_models.layers.fast_linear import use_fast_linears
from rft_models.loading.transformers_loading import model_without_weights
from rft_models.lora.fingerprint import fingerprint
from rft_models.lora.initial_values import Files, initialize
from rft_models.lora.merge import ADAPTER, MergeFacts, is_adapted, is_adapter_tensor, merge_into_base, to_plain_tensor
from rft_models.lora.targets import ALL_LINEAR, ends_with, linear_layers, target_modules
from rft_models.settings import AdapterKind

_FILE_PREFIX = "base_model.model."
"""What peft puts before the names of a causal language model's layers in its files."""


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """Configuration of adapters. Example: `AdapterRules(rank=8, targets=("q_proj", "v_proj"))`."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    kind: AdapterKind = "lora"

    @property
    def scale(self) -> float:
        """Scale s of B A: alpha / r, or alpha / sqrt(r) for rslora."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    @classmethod
    def of(cls, rank: int, alpha: float, dropout: float, targets: str, kind: AdapterKind) -> AdapterRules | None:
        """Return the rules that settings describe, targets joined by commas; None where the rank is 0."""
        parts = tuple(part.strip() for part in targets.split(",") if part.strip())
        return cls(rank, alpha, dropout, parts, kind) if rank else None


class Adapters:
    """The adapters of one model, made by `add_lora`."""

    def __init__(
        self,
        model: Any,
        rules: AdapterRules,
        config: Any,
        base_fingerprint: str,
        rows: RowKeys | None = None,
        waiting: dict[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self._rows = rows
        self.waiting = {} if waiting is None else waiting
        """Values of adapters that have no memory yet, by the model's names, see `initial_values`."""
        self.rules = rules
        self.config = config
        """peft's."""
        self.base_fingerprint = base_fingerprint
        """Of the weights under them, see `fingerprint.fingerprint`."""
        self._modules = {name: module for name, module in model.named_modules() if is_adapted(module)}
        self._facts = {name: _facts(module) for name, module in self._modules.items()}

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have one."""
        return list(self._modules)

    @property
    def num_parameters(self) -> int:
        """Weights of all adapters."""
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapters' parameters, as the model names them."""
        for name, parameter in self.model.named_parameters():
            if is_adapter_tensor(name, self._facts):
                yield name, parameter

    def base_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's own parameters, under the names of its files, without the adapters."""
        for name, parameter in self.model.named_parameters(remove_duplicate=remove_duplicate):
            if not is_adapter_tensor(name, self._facts):
                yield name.replace(".base_layer.", "."), parameter

    def cross_module_reads(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """(module, parameters of other modules that it reads): the lengths of DoRA's rows are over the matrix.

        A strategy that gathers the weights of each module for its forward has to gather these with it.
        """
        for name, module in self._modules.items():
            if self._facts[name].has_length:
                base = module.base_layer
                read = [base.weight, *([] if base.bias is None else [base.bias]), module.lora_A[ADAPTER].weight]
                yield module.lora_magnitude_vector[ADAPTER], read

    def merged(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Turn full tensors as the model names them into those of a model without adapters that computes the same."""
        return merge_into_base(((name, to_plain_tensor(tensor)) for name, tensor in named), self._facts)

    def tensors(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Select the adapters' tensors from full tensors as the model names them, under peft's names of files."""
        return {self.file_name(name): tensor for name, tensor in named if is_adapter_tensor(name, self._facts)}

    def file_name(self, name: str) -> str:
        """Return the name in peft's files: without the adapter's name, and for DoRA's lengths without ".weight"."""
        name = f"{_FILE_PREFIX}{name}".replace(f".{ADAPTER}.", ".")
        return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name

    def begin_update(self, number: int) -> None:
        """Let the masks of dropout be those of an optimizer step, counted from 0."""
        if self._rows is not None:
            self._rows.update = number

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute as if it had none."""
        self._switch(off=True)
        try:
            yield
        finally:
            self._switch(off=False)

    def _switch(self, *, off: bool) -> None:
        """Disable or enable the adapters, without peft's own switch.

        That one also sets which parameters require a gradient, which a gathered block keeps for ever.
        """
        for module in self._modules.values():
            module._disable_adapters = off


def add_lora(
    model: Any, rules: AdapterRules, *, seed: int, where: str, packed: bool = True, files: Files | None = None
) -> Adapters:
    """Put adapters around a transformers model's linear layers, in place; nothing but them is trained then.

    The model computes as before: B starts at zero. A is drawn uniformly from +-1 / sqrt(in), as peft does, from its
    own key of (seed, layer). `files`: where the weights are, of a model that has no memory for them yet.

    Raises:
        PreflightError: peft is not installed.
        OptionsError: a target that no linear layer has, or one that cannot have an adapter; dropout in a model
            that is not computed `packed`.
    """
    peft = load_peft()
    if rules.dropout and not packed:
        raise _no_rows(rules, where)
    # before peft changes the module tree: names and fingerprint are those of the base model
    targets = target_modules(linear_layers(model), rules.targets, [name for name, _ in model.named_modules()], where)
    base_fingerprint = fingerprint(model.named_parameters(), files)
    config = peft.LoraConfig(
        r=rules.rank,
        lora_alpha=rules.alpha,
        lora_dropout=rules.dropout,
        target_modules=targets,
        use_rslora=rules.kind == "rslora",
        use_dora=rules.kind == "dora",
        bias="none",
        base_model_name_or_path=where,
    )
    # all of the model first: `initialize` turns the adapters' own parameters on again
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws values that are replaced below
        warnings.simplefilter("ignore")  # it says that GPT-2's matrices are transposed, which it finds out itself
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    waiting: dict[str, Tensor] = {}
    for name, module in adapted.items():
        waiting |= initialize(name, module, derive_key(seed, f"adapter:{name}"), files)
    rows = _key_dropout(model, adapted, rules.dropout, seed) if rules.dropout else None
    use_fast_linears(model)  # again: peft put new linear layers in
    return Adapters(model, rules, config, base_fingerprint, rows, waiting)


def preview(directory: str, rules: AdapterRules, part_of: Callable[[Any], Any] = lambda model: model) -> list[str]:
    """Return the lines of `add_lora` with the model in a directory, from its configuration and without its weights.

    `part_of` gives the part of the model that is trained.

    Raises:
        OptionsError: a target that no linear layer has, or one that cannot have an adapter.
    """
    model = part_of(model_without_weights(directory))
    modules = dict(model.named_modules())
    ends = target_modules(linear_layers(model), rules.targets, list(modules), directory)
    layers = [modules[name] for name in linear_layers(model) if any(ends_with(name, end) for end in ends)]
    sizes = [sum(layer.weight.shape) * rules.rank for layer in layers]
    lengths = sum(layer.weight.shape[0] for layer in layers) if rules.kind == "dora" else 0
    total = sum(parameter.numel() for parameter in model.parameters())
    return [
        f"{rules.kind} of rank {rules.rank}, scale {rules.scale:g}: {sum(sizes) + lengths:,} weights are trained in"
        f" float32 beside {total:,} that are not",
        f"on {len(layers)} layers: {', '.join(sorted(end.rpartition('.')[2] for end in ends))}",
    ]


def load_peft() -> Any:
    """Import and return the peft package.

    Raises:
        PreflightError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise PreflightError(
            code="adapters.no_peft",
            what=f"adapters need peft: {error}",
            where="--lora_rank",
            why="it is an optional extra",
            state="nothing was loaded",
            do=install_command("lora"),
        ) from error
    return peft


def _key_dropout(model: Any, adapted: dict[str, Any], share: float, seed: int) -> RowKeys:
    """Replace peft's dropout, whose masks follow from the order of draws, by masks that follow from samples."""
    rows = RowKeys()
    model.get_decoder().register_forward_pre_hook(rows.hook, with_kwargs=True)
    for name, module in adapted.items():
        module.lora_dropout[ADAPTER] = KeyedDropout(share, derive_key(seed, f"dropout:{name}"), rows)
    return rows


def _facts(module: Any) -> MergeFacts:
    return MergeFacts(
        scale=float(module.scaling[ADAPTER]),
        has_length=ADAPTER in module.lora_magnitude_vector,
        transposed=bool(getattr(module, "fan_in_fan_out", False)),
    )


_UNKNOWN = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "target_parameters", "lora_bias")
"""Fields of peft's configuration that make other adapters than these, where they are not empty."""


def rules_of_config(config: Mapping[str, Any], where: str) -> AdapterRules:
    """Read the rules of an adapter_config.json, also one that another program wrote.

    Raises:
        DataError: it is not of adapters that are computed here.
    """
    other = [name for name in _UNKNOWN if config.get(name)]
    other += ["peft_type"] if config.get("peft_type") != "LORA" else []
    other += ["bias"] if config.get("bias", "none") != "none" else []
    targets = config.get("target_modules")
    other += [] if targets else ["target_modules"]
    if other:
        raise DataError(
            code="adapters.unknown_kind",
            what=f"{other[0]} = {config.get(other[0])!r} in adapter_config.json",
            where=where,
            why="supported are LoRA, rsLoRA and DoRA adapters of one rank on linear layers",
            do="merge the adapters with peft (merge_and_unload), and use the merged directory",
        )
    kind: AdapterKind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    named = (str(targets),) if isinstance(targets, str) else tuple(str(target) for target in targets or ())
    return AdapterRules(int(config["r"]), float(config["lora_alpha"]), 0.0, named, kind)


@dataclass(frozen=True, slots=True)
class BaseModelView:
    """The model that the run started from, at no memory: the policy with its adapters disabled.

    It computes on the policy's ranks and in its mode, so that it is called where the policy may be.
    """

    policy: Any
    """A `CausalPolicy` with adapters."""

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute `CausalPolicy.token_logprobs` without adapters and without gradient."""
        adapters: Adapters = self.policy.adapters
        with adapters.disabled(), torch.no_grad():
            return self.policy.token_logprobs(tokens, **options)


def _no_rows(rules: AdapterRules, where: str) -> OptionsError:
    return OptionsError(
        code="adapters.dropout_native",
        what=f"lora_dropout {rules.dropout:g} with a model that computes its own attention",
        where=where,
        why="dropout masks are derived from the rows of the packed forward, so that no split of a batch changes them",
        do="--lora_dropout 0",
    )
