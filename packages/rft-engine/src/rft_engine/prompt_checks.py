"""What every engine refuses of prompts before it generates anything."""

from __future__ import annotations

from collections.abc import Sequence

from rft_algos.errors import OptionsError


def check_keys(prompts: Sequence[Sequence[int]], sample_keys: Sequence[Sequence[int]]) -> None:
    """Raise `OptionsError` unless every prompt has its list of keys."""
    if len(prompts) != len(sample_keys):
        what = f"{len(prompts)} prompts, {len(sample_keys)} lists of sample keys"
        raise refusal("engine.sample_keys", what, "every prompt has its list of keys", "one list of keys a prompt")


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_len: int, vocab_size: int) -> None:
    """Raise `OptionsError` for the first prompt that is empty, has no room for new tokens, or holds an unknown one."""
    room = max_len - max_new_tokens
    for index, prompt in enumerate(prompts):
        if not prompt:
            why = "there is nothing to continue"
            raise refusal("engine.empty_prompt", f"prompt {index} has no tokens", why, f"leave prompt {index} out")
        if len(prompt) > room:
            raise refusal(
                "engine.prompt_too_long",
                f"prompt {index} has {len(prompt)} tokens, max_len - max_new_tokens = "
                f"{max_len} - {max_new_tokens} = {room}",
                "a prompt and its completion share max_len tokens",
                f"max_len={len(prompt) + max_new_tokens}",
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            raise refusal(
                "engine.unknown_token",
                f"prompt {index} holds token {token}, the model knows 0 to {vocab_size - 1}",
                "a prompt consists of the model's tokens",
                "encode the prompts with the tokenizer of this model",
            )


def refusal(code: str, what: str, why: str, remedy: str) -> OptionsError:
    """An option or a prompt that cannot be served."""
    return OptionsError(
        code=code, what=what, where="in-process engine", why=why, state="nothing was generated", do=remedy
    )
