"""Make transformers know the family: in this process, and only where a directory of the family is met.

A program without this package calls `register_own_decoder()` before `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rft_models.own_decoder.architecture import MODEL_TYPE


def register_own_decoder() -> None:
    """Let transformers' automatic classes load directories of the family."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

    if MODEL_TYPE in CONFIG_MAPPING:
        return
    from rft_models.own_decoder.modeling import RftDecoderConfig, RftDecoderForCausalLM, RftDecoderModel

    AutoConfig.register(MODEL_TYPE, RftDecoderConfig)
    AutoModel.register(RftDecoderConfig, RftDecoderModel)
    AutoModelForCausalLM.register(RftDecoderConfig, RftDecoderForCausalLM)


def register_for(directory: Path) -> None:
    """`register_own_decoder` where config.json of this directory names the family."""
    try:
        stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # whoever reads the file says what is wrong with it
    if isinstance(stated, dict) and stated.get("model_type") == MODEL_TYPE:
        register_own_decoder()
