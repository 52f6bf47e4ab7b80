"""What an engine with weights of its own is sent of a policy with adapters: them alone where it can add them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from rft_models.adapter_files import config_text
from rft_models.policy import CausalPolicy

MOST_ALONE = 512
"""Highest rank that vLLM makes room for."""


@dataclass(frozen=True, slots=True)
class AloneAdapters:
    """Adapters as vLLM takes them."""

    config: str
    """adapter_config.json."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Under peft's names of files."""


def sent_alone(policy: CausalPolicy, engine: str, *, whole: bool) -> AloneAdapters | None:
    """The adapters to send after every update; None: tensors with the adapters folded in are sent.

    vLLM adds LoRA and rsLoRA itself. It has no DoRA, and SGLang's loads of adapters are not taken in place.
    `whole`: the policy's parameters are whole on this rank; in blocks they come together with the others.
    """
    adapters = policy.adapters
    if engine != "vllm" or adapters is None or not whole or adapters.rules.kind == "dora":
        return None
    if adapters.rules.rank > MOST_ALONE:
        return None
    return AloneAdapters(config_text(adapters), lambda: adapters.tensors(adapters.named_parameters()).items())
