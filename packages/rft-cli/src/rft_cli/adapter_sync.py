"""What an engine with weights of its own is sent of a policy with adapters: them alone where it can add them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from rft_models.lora.files import config_text
from rft_models.policy.causal_policy import CausalPolicy

Provider = Callable[[], Iterable[tuple[str, Tensor]]]
MOST_ALONE = 512
"""Highest rank that vLLM makes room for."""


@dataclass(frozen=True, slots=True)
class AloneAdapters:
    """Adapters as vLLM takes them."""

    config: str
    """adapter_config.json."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Under peft's names of files."""


def adds_adapters(policy: CausalPolicy, engine: str) -> bool:
    """Whether an engine adds the policy's adapters itself; else it is sent tensors with the adapters folded in.

    vLLM adds LoRA and rsLoRA. It has no DoRA, and SGLang's loads of adapters are not taken in place.
    """
    rules = None if policy.adapters is None else policy.adapters.rules
    return engine == "vllm" and rules is not None and rules.kind != "dora" and rules.rank <= MOST_ALONE


def alone_adapters(policy: CausalPolicy, gather: Provider | None = None) -> AloneAdapters:
    """The adapters to send after every update.

    `gather` gives their whole parameters where those lie in blocks, by an exchange; None: this rank has them whole.
    """
    adapters = policy.adapters
    assert adapters is not None, "no adapters to send"
    given = gather or adapters.named_parameters
    return AloneAdapters(config_text(adapters), lambda: adapters.tensors(given()).items())
