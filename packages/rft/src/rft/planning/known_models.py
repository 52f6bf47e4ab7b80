"""Published models by family, for a plan without their files: what their config.json says of their widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

_WIDTHS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def _model(widths: tuple[int, int, int, int, int], vocab_size: int, *, tied: bool) -> dict[str, Any]:
    return dict(zip(_WIDTHS, widths, strict=True)) | {"vocab_size": vocab_size, "tie_word_embeddings": tied}


_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 128}
_LLAMA = {"model_type": "llama", "max_position_embeddings": 131072}
FAMILIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "qwen2.5": {
        "0.5B": _QWEN2 | _model((896, 24, 14, 2, 4864), 151936, tied=True),
        "1.5B": _QWEN2 | _model((1536, 28, 12, 2, 8960), 151936, tied=True),
        "3B": _QWEN2 | _model((2048, 36, 16, 2, 11008), 151936, tied=True),
        "7B": _QWEN2 | _model((3584, 28, 28, 4, 18944), 152064, tied=False),
        "14B": _QWEN2 | _model((5120, 48, 40, 8, 13824), 152064, tied=False),
        "32B": _QWEN2 | _model((5120, 64, 40, 8, 27648), 152064, tied=False),
        "72B": _QWEN2 | _model((8192, 80, 64, 8, 29568), 152064, tied=False),
    },
    "qwen3": {
        "0.6B": _QWEN3 | _model((1024, 28, 16, 8, 3072), 151936, tied=True),
        "1.7B": _QWEN3 | _model((2048, 28, 16, 8, 6144), 151936, tied=True),
        "4B": _QWEN3 | _model((2560, 36, 32, 8, 9728), 151936, tied=True),
        "8B": _QWEN3 | _model((4096, 36, 32, 8, 12288), 151936, tied=False),
        "14B": _QWEN3 | _model((5120, 40, 40, 8, 17408), 151936, tied=False),
        "32B": _QWEN3 | _model((5120, 64, 64, 8, 25600), 151936, tied=False),
    },
    "llama3": {
        "1B": _LLAMA | {"head_dim": 64} | _model((2048, 16, 32, 8, 8192), 128256, tied=True),
        "3B": _LLAMA | {"head_dim": 128} | _model((3072, 28, 24, 8, 8192), 128256, tied=True),
        "8B": _LLAMA | {"head_dim": 128} | _model((4096, 32, 32, 8, 14336), 128256, tied=False),
        "70B": _LLAMA | {"head_dim": 128} | _model((8192, 80, 64, 8, 28672), 128256, tied=False),
    },
}
"""Family -> name -> the part of config.json that a plan reads, the smallest first."""


def known_model(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the full name and the configuration of a model, such as `qwen3-32B`, or of the first one of size `32B`.

    Raises:
        OptionsError: no family has it.
    """
    for family, models in FAMILIES.items():
        for size, config in models.items():
            if text.casefold() in (size.casefold(), f"{family}-{size}".casefold()):
                return f"{family}-{size}", config
    names = [f"{family}-{size}" for family, models in FAMILIES.items() for size in models]
    (near,) = nearest_names(text, names, count=1) or names[:1]
    raise OptionsError(
        code="plan.model_size",
        what=f"--model_size = {text!r}",
        where="command line",
        why=f"it is one of {', '.join(names)}, or a size of them",
        do=f"--model_size {near}",
    )
