"""A model that a program holds as a directory that a run reads."""

from __future__ import annotations

import hashlib
import shutil
from os import PathLike, fspath
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

from rft.process.cache import cache_directory
from rft_core.durable_files import storage_errors
from rft_core.errors import OptionsError


def model_place(model: object, tokenizer: object | None = None) -> str:
    """Return the directory, or the name on the Hub, from which a run reads `model`.

    A model of transformers is written, with its tokenizer, to the cache of the user under the hash of its weights.

    Args:
        model: a directory, a name on the Hub, a `Run` (its newest checkpoint), or a model of transformers.
        tokenizer: of a model of transformers; None: the one of the directory that the model was loaded from.

    Raises:
        OptionsError: another kind of object, adapters that are not merged, or no tokenizer.
    """
    if isinstance(model, str | PathLike):
        if tokenizer is not None:
            raise _refused(
                "a tokenizer beside the name of a model", "a directory holds its own tokenizer", "leave tokenizer out"
            )
        return str(fspath(cast("str | PathLike[str]", model)))
    if hasattr(model, "peft_config"):
        raise _refused(
            "a model with adapters",
            "a run trains whole weights, or adapters of its own (lora_rank)",
            "model=MODEL.merge_and_unload()",
        )
    if not all(getattr(model, member, None) for member in ("save_pretrained", "state_dict", "config")):
        raise _refused(
            f"of type {type(model).__name__}",
            "a run reads a directory, a name on the Hub, or a model of transformers",
            'model="Qwen/Qwen3-0.6B"',
        )
    return _written(model, tokenizer if tokenizer is not None else _own_tokenizer(model))


def _own_tokenizer(model: Any) -> object:
    """Return the tokenizer of the directory that the model was loaded from."""
    source = Path(str(getattr(model, "name_or_path", "") or ""))
    if source.name and (source / "tokenizer_config.json").is_file():
        from rft_models.loading.transformers_loading import plain_tokenizer

        return plain_tokenizer(source)
    raise _refused(
        f"a {type(model).__name__} without a tokenizer",
        "it was not loaded from a directory that holds one",
        "tokenizer=TOKENIZER",
    )


def _written(model: Any, tokenizer: Any) -> str:
    path = cache_directory() / "models" / _fingerprint(model, tokenizer)
    # its name is the hash of its content: one that is there is the same
    if path.is_dir():
        return str(path)
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(dir=path.parent))
        try:
            model.save_pretrained(part, safe_serialization=True)
            tokenizer.save_pretrained(part)
            part.rename(path)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            # another process wrote the same meanwhile
            if not path.is_dir():
                raise
    return str(path)


def _fingerprint(model: Any, tokenizer: Any) -> str:
    import torch

    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy())
    digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(str(getattr(tokenizer, "chat_template", "")).encode())
    return digest.hexdigest()[:20]


def _refused(what: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.model",
        what=f"model is {what}",
        where="argument model",
        why=why,
        state="nothing was started",
        do=do,
    )
