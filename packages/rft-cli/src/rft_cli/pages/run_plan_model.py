"""Model's part of the plan page: kernels, memory, precision, and weights that are not trained."""

from __future__ import annotations

from rft.build.lora import adapter_lines
from rft.build.models import checkpointing_of, freezing_of
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine, bfloat16_arithmetic
from rft_models.attention.kernels import describe_attention
from rft_models.layers.moe_router import router_facts
from rft_models.loading.context_length import model_facts
from rft_models.policy import freezing
from rft_models.settings import AdapterSettings, ModelSettings


def model_lines(
    settings: ModelSettings, machine: Machine, adapter: AdapterSettings, *, needs_reference: bool = False
) -> list[tuple[str, list[str]]]:
    """Titled groups of lines. Read from the configuration; no weights are loaded.

    Raises:
        OptionsError: what is to be frozen does not exist, leaves nothing to train, or there are no routers to balance;
            no layer has the name of a target module.
    """
    return [
        ("adapters", adapter_lines(adapter, settings.pretrain, needs_reference=needs_reference)),
        ("weights", _weights(settings, machine)),
        ("attention", [_attention(settings, machine)]),
        ("memory", _memory(settings)),
        ("frozen", _frozen(settings)),
        ("routers", _routers(settings)),
    ]


def _weights(settings: ModelSettings, machine: Machine) -> list[str]:
    """Return the warnings on bfloat16 training, where it is asked for."""
    if not settings.bf16:
        return []
    lost = "bfloat16 weights and moments, no float32 copy: an update under 1/256 of a weight is lost, at 1e-6 most are"
    how = bfloat16_arithmetic(machine.device)
    return [lost, how] if how else [lost]


def _attention(settings: ModelSettings, machine: Machine) -> str:
    facts = model_facts(settings.pretrain)
    kind = facts.model_type
    dtype = weights_dtype(settings.bf16)
    return describe_attention(kind, machine.device, dtype, flash_attn=settings.flash_attn, text_type=facts.text_type)


def _memory(settings: ModelSettings) -> list[str]:
    chosen = checkpointing_of(settings)
    return [f"gradient checkpointing {chosen}"] if chosen else []


def _frozen(settings: ModelSettings) -> list[str]:
    rules = freezing_of(settings)
    return freezing.preview(settings.pretrain, rules).lines() if rules.freezes else []


def _routers(settings: ModelSettings) -> list[str]:
    if not settings.aux_loss_coef:
        return []
    moe = router_facts(settings.pretrain)
    loss = f"{settings.aux_loss_coef:g} x load-balancing loss of {moe.num_experts} experts, {moe.num_choices} a token"
    return [f"{loss}; a step of several micro-batches counts them first, in one more forward of the backbone"]
