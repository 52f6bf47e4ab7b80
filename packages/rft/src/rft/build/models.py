"""Models from settings: the arguments of their loading, and what their configuration says before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rft.parallel.parallelize import weights_dtype
from rft_dist.optim.parameter_groups import matches, require_known_names
from rft_dist.settings import AdamSettings, factors_of
from rft_models.attention.kernels import describe_attention
from rft_models.families.custom import load_model_code
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.layers.moe_router import Router, router_facts
from rft_models.loading.context_length import ModelFacts, model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeReport, preview
from rft_models.policy.load_for_training import checkpointing_of, freezing_of
from rft_models.settings import ModelSettings, RouterSettings, TrainedWeightsSettings, WeightsSettings
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.processor import load_processor
from rft_trainer.update.moe_aux_loss import no_router_bias


def tokenizer_of(settings: WeightsSettings) -> HfTokenizer:
    """The tokenizer, with the image processor of a vision model, after the user's model code has run."""
    load_model_code(settings.model_code)
    return load_processor(settings.pretrain)


@dataclass(frozen=True, slots=True)
class ModelPreview:
    """A model as its configuration and its settings describe it; no weights are loaded."""

    attention: str
    """The kernel, in words."""
    checkpointing: Checkpointing | None
    frozen: FreezeReport | None
    """None where every weight is trained."""
    router: Router | None
    """None where no load-balancing loss is asked for."""


def preview_model(settings: ModelSettings, device: str) -> ModelPreview:
    """Read the model's configuration.

    Raises:
        OptionsError: what is to be frozen does not exist, leaves nothing to train, or there are no routers to balance.
    """
    facts, rules = model_facts(settings.pretrain), freezing_of(settings)
    return ModelPreview(
        attention=_attention(facts, settings, device),
        checkpointing=checkpointing_of(settings),
        frozen=preview(settings.pretrain, rules) if rules.freezes else None,
        router=router_facts(settings.pretrain) if settings.aux_loss_coef else None,
    )


def check_routers(settings: ModelSettings, routers: RouterSettings) -> None:
    """Read whether the model has the routers that are to be trained.

    Raises:
        OptionsError: it has none that are known, or none with a bias.
    """
    if not (routers.router_z_loss_coef or routers.balance_bias_rate):
        return
    found = router_facts(settings.pretrain)
    if routers.balance_bias_rate and not found.by_sigmoid:
        raise no_router_bias(routers.balance_bias_rate)


def attention_line(
    settings: TrainedWeightsSettings, device: str, *, without_head: bool = False
) -> tuple[str, Checkpointing | None]:
    """(the attention kernel in words, what the backward pass recomputes), from the configuration, as `model_facts`."""
    facts = model_facts(settings.pretrain, without_head=without_head)
    return _attention(facts, settings, device), checkpointing_of(settings)


def _attention(facts: ModelFacts, settings: TrainedWeightsSettings, device: str) -> str:
    dtype = weights_dtype(settings.bf16)
    return describe_attention(
        facts.model_type, device, dtype, flash_attn=settings.flash_attn, text_type=facts.text_type
    )


def refuse_unknown_parts(policy: CausalPolicy, adam: AdamSettings, value_head: str = "") -> None:
    """Refuse rates and decays of parts that are not trained; `value_head` as in `preview_groups`.

    Raises:
        OptionsError: a name that no trained parameter has.
    """
    trained = [name for name, _ in policy.trainable_parameters()]
    require_known_names(adam, [*trained, value_head] if value_head else trained)


def preview_groups(settings: ModelSettings, adam: AdamSettings, value_head: str = "") -> list[str]:
    """Return a line for each part of the model with a rate or decay of its own, from the configuration alone.

    Args:
        settings: the model, and what of it is frozen.
        adam: the settings of the update.
        value_head: name of the weight of a critic's head that is trained too; empty = none.

    Raises:
        OptionsError: a name that no trained parameter has, as a start refuses it.
    """
    if not adam.lr_factors and not adam.l2_factors:
        return []
    # those that are trained alone: a factor of a frozen part would have no effect
    names = [*preview(settings.pretrain, freezing_of(settings)).trained]
    names += [value_head] if value_head else []
    require_known_names(adam, names)
    lines: list[str] = []
    for setting, what in (("lr_factors", "learning rate"), ("l2_factors", "weight decay")):
        for pattern, factor in factors_of(setting, getattr(adam, setting)):
            count = sum(matches(pattern, name) for name in names)
            lines.append(f"{pattern}: {factor:g} x the {what} ({count} of {len(names)} tensors)")
    return lines
