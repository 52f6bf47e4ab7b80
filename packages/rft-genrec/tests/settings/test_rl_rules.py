"""Contradictions of `genrec rl`."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_genrec.settings.rl_rules import reward_terms


def codes(*words: str) -> set[str]:
    try:
        resolve("genrec-rl", ["--catalogue", "tools", "--pretrain", "model", *words])
    except SettingsError as error:
        return {problem.code for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--prompt_data rows.jsonl", "genrec.rows_of_catalogue"),
        ("--constraint sums", "genrec.rows_of_catalogue"),
        ("--generate_max_len 9", "genrec.rows_of_catalogue"),
        ("--reward exact", "genrec.rows_of_catalogue"),
        ("--genrec_reward luck", "genrec.reward_names"),
        ("--genrec_reward rule=much", "genrec.reward_names"),
        ("--genrec_reward=", "genrec.reward_names"),
        ("--genrec_reward semantic", "genrec.reward_input"),
        ("--item_embeddings a.npy", "genrec.reward_input"),
        ("--item_scorer a:b", "genrec.reward_input"),
        ("--item_scorer_path a", "genrec.reward_input"),
        ("--temperature 0", "sampling.greedy"),
    ],
)
def test_a_contradiction_is_refused(words: str, code: str) -> None:
    assert codes(*words.split()) == {code}


def test_terms_have_weights() -> None:
    assert codes("--genrec_reward", "rule,semantic=0.5", "--item_embeddings", "a.npy") == set()
    assert codes("--genrec_reward", "rule,ranking", "--group_source", "beams") == set()
    assert reward_terms("rule, prefix=0.25") == {"rule": 1.0, "prefix": 0.25}
    with pytest.raises(ValueError, match="named twice"):
        reward_terms("rule,rule=2")
