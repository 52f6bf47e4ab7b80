"""Checks of prompts, keys, budgets and media that every engine makes before it generates."""

from __future__ import annotations

from collections.abc import Sequence

from rft_core.errors import OptionsError


def check_keys(prompts: Sequence[Sequence[int]], sample_keys: Sequence[Sequence[int]]) -> None:
    """Raise `OptionsError` unless every prompt has its list of keys."""
    if len(prompts) != len(sample_keys):
        what = f"{len(prompts)} prompts, {len(sample_keys)} lists of sample keys"
        raise refusal("engine.sample_keys", what, "every prompt has its list of keys", "one list of keys a prompt")


def check_media(prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None) -> None:
    """Raise `OptionsError` unless media are as many as prompts, where any are given."""
    if media is not None and len(media) != len(prompts):
        what = f"{len(prompts)} prompts, {len(media)} entries of media"
        raise refusal("engine.media", what, "every prompt has its entry, None without images", "one entry a prompt")


def check_budgets(
    sample_keys: Sequence[Sequence[int]], budgets: Sequence[Sequence[int]] | None, max_new_tokens: int
) -> list[int]:
    """The budget of every sample, prompt after prompt; raise `OptionsError` for one that is out of its range."""
    if budgets is None:
        return [max_new_tokens for keys in sample_keys for _ in keys]
    if [len(keys) for keys in sample_keys] != [len(prompt_budgets) for prompt_budgets in budgets]:
        what = f"budgets for {sum(map(len, budgets))} samples, keys for {sum(map(len, sample_keys))}"
        raise refusal("engine.budgets", what, "every sample has its key and its budget", "one budget a key")
    flat = [budget for prompt_budgets in budgets for budget in prompt_budgets]
    wrong = next((budget for budget in flat if not 1 <= budget <= max_new_tokens), None)
    if wrong is not None:
        why = f"a sample has at least one token and at most max_new_tokens = {max_new_tokens}"
        raise refusal("engine.budgets", f"a budget of {wrong} tokens", why, f"max_new_tokens={max(flat)}")
    return flat


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
            raise unknown_token("prompt", f"prompt {index}", token, vocab_size)


def unknown_token(noun: str, subject: str, token: int, vocab_size: int) -> OptionsError:
    """Return the error for a token that the model does not have, in a prompt or in another `noun`."""
    what = f"{subject} contains token {token}; the model's tokens are 0 to {vocab_size - 1}"
    why, remedy = f"a {noun} consists of the model's tokens", f"encode the {noun}s with the tokenizer of this model"
    return refusal("engine.unknown_token", what, why, remedy)


def refusal(code: str, what: str, why: str, remedy: str) -> OptionsError:
    """An option or a prompt that cannot be served."""
    return OptionsError(
        code=code, what=what, where="call of an engine", why=why, state="nothing was generated", do=remedy
    )
