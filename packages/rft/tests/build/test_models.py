"""Models from settings: the user's code runs before the tokenizer is read, and a preview loads no weights."""

from __future__ import annotations

from typing import Any

import pytest

from rft.build import models


def test_the_code_of_a_model_runs_before_its_tokenizer_is_read(calls: Any) -> None:
    calls.put(models, "load_model_code load_processor")
    assert models.tokenizer_of(calls.double("settings")) == "load_processor()"
    assert calls.taken() == ["load_model_code(settings.model_code)", "load_processor(settings.pretrain)"]


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("loss", [0.0, 0.5])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_preview_reads_what_the_settings_ask_for(calls: Any, freezes: bool, loss: float, bf16: bool) -> None:
    calls.put(
        models,
        "model_facts checkpointing_of describe_attention preview router_facts",
        freezing_of=calls.double("rules", freezes=freezes),
    )
    settings = calls.double("settings", bf16=bf16, aux_loss_coef=loss)
    found = models.preview_model(settings, "meta")
    assert (found.attention, found.checkpointing) == ("describe_attention()", "checkpointing_of()")
    assert found.frozen == ("preview()" if freezes else None)
    assert found.router == ("router_facts()" if loss else None)
    made = [
        "model_facts(settings.pretrain)",
        "freezing_of(settings)",
        f"describe_attention(model_facts().model_type, 'meta', torch.{'bfloat16' if bf16 else 'float32'}, "
        "flash_attn=settings.flash_attn, text_type=model_facts().text_type)",
        "checkpointing_of(settings)",
    ]
    if freezes:
        made.append("preview(settings.pretrain, rules)")
    if loss:
        made.append("router_facts(settings.pretrain)")
    assert calls.taken() == made
