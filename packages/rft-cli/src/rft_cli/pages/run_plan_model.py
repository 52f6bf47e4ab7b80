"""Model's part of the plan page: adapters, kernels, memory, precision, and weights that are not trained."""

from __future__ import annotations

from rft.build.lora import preview_adapters
from rft.build.models import ModelPreview, preview_groups, preview_model
from rft.process.machine import Machine, bfloat16_arithmetic
from rft_dist.settings import AdamSettings
from rft_models.policy.freezing import FreezeReport
from rft_models.settings import AdapterSettings, ModelSettings


def model_lines(
    settings: ModelSettings,
    machine: Machine,
    adapter: AdapterSettings,
    adam: AdamSettings,
    *,
    needs_reference: bool = False,
    value_head: str = "",
) -> list[tuple[str, list[str]]]:
    """Titled groups of lines. Read from the configuration; no weights are loaded.

    Raises:
        OptionsError: what is to be frozen does not exist, leaves nothing to train, or there are no routers to balance;
            no layer has the name of a target module, or no parameter that of a factor.
    """
    adapters = preview_adapters(adapter, settings.pretrain)
    if adapters and needs_reference:
        adapters.append("the reference is the policy with its adapters disabled: no second model is loaded")
    model = preview_model(settings, machine.device)
    return [
        ("adapters", adapters),
        ("weights", _weights(settings, machine, adapted=bool(adapters))),
        ("attention", [model.attention]),
        ("memory", [f"gradient checkpointing {model.checkpointing}"] if model.checkpointing else []),
        ("frozen", frozen_lines(model.frozen) if model.frozen else []),
        # adapters have names of their own, which are known once they are made
        ("optimizer", [] if adapters else preview_groups(settings, adam, value_head)),
        ("routers", _routers(settings, model)),
    ]


def frozen_lines(report: FreezeReport) -> list[str]:
    """Return how much is trained, and the name of everything that is not."""
    frozen = report.num_weights - report.num_trained
    lines = [f"{report.num_trained:,} of {report.num_weights:,} weights are trained; {frozen:,} are frozen:"]
    for name, (first, num_rows, width) in report.rows.items():
        lines.append(f"{name} rows 0 to {first - 1:,} ({first * width:,}); trained from row {first:,} ({num_rows})")
    return lines + [f"{name} ({count:,})" for name, count in report.tensors_by_pattern().items()]


def _weights(settings: ModelSettings, machine: Machine, *, adapted: bool) -> list[str]:
    """Return the warnings on bfloat16 training, where it is asked for; adapters beside such weights are float32."""
    if not settings.bf16:
        return []
    lost = "bfloat16 weights and moments, no float32 copy: an update under 1/256 of a weight is lost, at 1e-6 most are"
    kept = "bfloat16 weights, which stay as they are: what is trained is float32"
    how = bfloat16_arithmetic(machine.device)
    return [kept if adapted else lost, *([how] if how else [])]


def _routers(settings: ModelSettings, model: ModelPreview) -> list[str]:
    if model.router is None:
        return []
    experts = f"{model.router.num_experts} experts, {model.router.num_choices} a token"
    loss = f"{settings.aux_loss_coef:g} x load-balancing loss of {experts}"
    return [f"{loss}; a step of several micro-batches counts them first, in one more forward of the backbone"]
