"""Models that only score: how they are loaded and shared, and tokens that they must have in common with the policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rft.parallel import frozen_policy
from rft_core.errors import OptionsError

DOUBLES = "load_reference load_reference_on_meta held_dtype head_chunk_size ShardablePolicy parallelize"


@pytest.mark.parametrize("meta", [False, True])
def test_a_frozen_model_is_loaded_as_the_policy_is_and_shared_as_a_reference(calls: Any, meta: bool) -> None:
    strategy = calls.double("strategy", reference=calls.double("as_reference", returns="reference strategy"))
    calls.put(frozen_policy, DOUBLES)
    calls.put(frozen_policy, choose_strategy=strategy)
    settings, machine = calls.double("settings", meta_init=meta), calls.double("machine")
    model = calls.double("model")
    policy = frozen_policy.load_frozen("directory", model, settings, machine)
    frozen_policy.share_frozen(policy, settings, machine)
    load = "load_reference_on_meta" if meta else "load_reference"
    made = calls.taken()
    assert [call.partition("(")[0] for call in made] == [
        *("held_dtype", "head_chunk_size", load, "choose_strategy", "as_reference", "ShardablePolicy", "parallelize")
    ]
    assert f"{load}('directory', device=machine.device, dtype=held_dtype()" in made[2]
    assert made[-1] == "parallelize(ShardablePolicy(), 'reference strategy', None, machine)"


def test_a_model_with_other_token_ids_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenizer(**ids: int) -> Any:
        return SimpleNamespace(hf_tokenizer=SimpleNamespace(get_vocab=lambda: ids))

    monkeypatch.setattr(frozen_policy, "load_tokenizer", lambda directory: tokenizer(a=0, b=2))  # pyright: ignore
    with pytest.raises(OptionsError, match=r"1 tokens have other ids .* 'b' is 2 there and 1 here") as caught:
        frozen_policy.require_same_tokenizer("other/model", tokenizer(a=0, b=1), "--teacher_pretrain")
    assert caught.value.problem.where == "--teacher_pretrain"
    frozen_policy.require_same_tokenizer("other/model", tokenizer(a=0, b=2), "--teacher_pretrain")
