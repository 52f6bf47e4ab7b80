"""Open a model directory with transformers: local files, safetensors, no code from the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from rft_core.errors import DataError, OptionsError
from rft_models.attention.hf_interface import IMPLEMENTATION, register, switched
from rft_models.families.registry import TEXT_FAMILIES, custom_classes, packed_families, packs
from rft_models.families.vision import is_unknown_vision, is_vision, unknown_family
from rft_models.files.directories import damaged_weights, missing_weights, no_progress_bars, read_config
from rft_models.files.transformers_config import hf_config, refusals, refused_config
from rft_models.layers import gradient_checkpointing as checkpointing
from rft_models.layers.fast_linear import use_fast_linears
from rft_models.layers.fast_norm import use_fast_norms
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.freed_memory import keep_freed_memory
from rft_models.own_decoder.dropout import turn_off_dropout

Attention = Literal["auto", "packed", "native"]


AutoClass = Literal["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"]


def prepare(model: Any, *, packed: bool, gradient_checkpointing: Checkpointing | bool | None = None) -> None:
    """Switch a transformers model to the computations used here; it is in eval mode, and drops nothing, afterwards."""
    if packed:
        register()
        switched(model).set_attn_implementation(IMPLEMENTATION)
    use_fast_linears(model)
    use_fast_norms(model)
    keep_freed_memory()
    turn_off_dropout(model)
    if gradient_checkpointing:
        chosen = gradient_checkpointing if isinstance(gradient_checkpointing, Checkpointing) else Checkpointing()
        checkpointing.apply(model, chosen)
    model.eval()


def native_attention(config: dict[str, Any]) -> str:
    """Implementation to load with: fused, except that transformers' fused one leaves out softcapping."""
    return "eager" if config.get("attn_logit_softcapping") else "sdpa"


def auto_class_of(config: dict[str, Any]) -> AutoClass:
    """Return the class of transformers that reads a policy of this configuration."""
    return "AutoModelForImageTextToText" if is_vision(config["model_type"]) else "AutoModelForCausalLM"


def refuse_other_kinds(path: Path, config: dict[str, Any], *, takes_images: bool = False) -> None:
    """Raise a DataError unless the configuration is that of a causal language model of transformers.

    `takes_images`: a vision-language model of one of `VISION_FAMILIES` will do too.
    """
    where = str(path / "config.json")
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    known = TEXT_FAMILIES.get(model_type or "")
    if known and (not architectures or known.class_name in architectures):
        return
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    # an architecture that transformers has is loaded by its code there, whatever auto_map names
    if "auto_map" in config and model_type not in CONFIG_MAPPING:
        raise DataError(
            code="models.needs_remote_code",
            what=f"model_type {model_type!r} is Python code in the directory (auto_map in config.json)",
            where=where,
            why="code from a model directory is never run",
            do="use a model whose architecture is part of transformers",
        )
    causal_classes = {name for value in CAUSAL.values() for name in ([value] if isinstance(value, str) else value)}
    named = model_type in CAUSAL or model_type in custom_classes()
    causal_classes.update(custom_classes().values())
    if takes_images and is_vision(model_type or ""):
        named = True
        causal_classes.update({name for name in architectures if name.endswith("ForConditionalGeneration")})
    if named and (not architectures or causal_classes.intersection(architectures)):
        return
    if is_unknown_vision(config):
        raise unknown_family(config, where)
    known = model_type in CONFIG_MAPPING
    raise DataError(
        code="models.not_causal" if known else "models.unknown_architecture",
        what=f"model_type {model_type!r} with architectures {architectures} is not a causal language model",
        where=where,
        why="tokens are generated and scored left to right: the class must be one of transformers' causal models"
        if known
        else "this transformers does not know the architecture",
        do="use the model's ...ForCausalLM directory"
        if known
        else "install a transformers that has it, or name its code with --model_code",
    )


def choose_packed(model_type: str, attention: Attention, path: Path, *, text_type: str = "") -> bool:
    """Return true where the packed attention is used, see `load_policy`; raise `OptionsError` where it cannot be.

    `text_type` is that of the decoder in a model whose own type does not determine it (LLaVA).
    """
    known = packs(model_type) or (is_vision(model_type) and packs(text_type))
    if attention == "packed" and not known:
        raise OptionsError(
            code="models.no_packed_attention",
            what=f'attention "packed" is not known for model_type {model_type!r}, only for '
            f"{', '.join(sorted(packed_families()))}",
            where=str(path),
            why="packing is exact only where nothing but the attention mixes tokens",
            do='use attention "auto"',
        )
    return known and attention != "native"


def load_model(
    path: Path,
    dtype: torch.dtype | Literal["auto"],
    attention: str,
    *,
    auto_class: AutoClass,
    more: dict[str, Any] | None = None,
) -> Any:
    """Load the weights in a checked directory; "AutoModel" is the decoder alone and leaves every head in the file out.

    `more`: further arguments of transformers' `from_pretrained`.

    Raises:
        DataError: the weights are damaged, or the file lacks some of the architecture's.
    """
    import transformers

    config = hf_config(path, attention)
    try:
        with no_progress_bars():
            loaded: Any = getattr(transformers, auto_class).from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=attention,
                output_loading_info=True,
                **(more or {}),
            )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise damaged_weights(path, error) from error
    # of values that are no values of this architecture; the files have not been looked at
    except (ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise refused_config(path, error) from error
    model, report = loaded
    # transformers draws these at random and only warns
    missing = sorted(str(name) for name in report["missing_keys"])
    if missing:
        what = f"{len(missing)} tensors of the architecture are not in the files, the first is {missing[0]}"
        raise missing_weights(path, what)
    return model


def model_without_weights(directory: str | Path) -> Any:
    """Return the transformers model that a directory's configuration describes; its tensors have no memory.

    Raises:
        DataError: no model can be made with it.
    """
    import transformers

    path = Path(directory)
    config = hf_config(path)
    with refusals(path, RuntimeError), torch.device("meta"):  # shapes without memory
        return getattr(transformers, auto_class_of(config.to_dict())).from_config(config)


def plain_model(directory: str | Path) -> Any:
    """Load a directory as transformers has it, in the type of its weights and in eval mode: nothing is patched.

    Raises:
        DataError: no model of transformers, or damaged weights.
    """
    path = Path(directory)
    config = read_config(path)
    refuse_other_kinds(path, config, takes_images=True)
    attention = native_attention(config)
    return load_model(path, "auto", attention, auto_class=auto_class_of(config)).eval()


def plain_tokenizer(directory: str | Path) -> Any:
    """Load the tokenizer of a directory as transformers has it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
