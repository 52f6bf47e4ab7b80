"""Prompts of an RL run in a store: the run has the prompts, labels, columns, order and messages of one without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rft.build.reward_parts import reward_columns
from rft.build.rl_data import RlData, rl_data
from rft.settings import RlSettings
from rft.tokenizing import row_store
from rft_core.errors import DataError, OptionsError
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.store.build import in_this_process
from rft_trainer.data.store.prompt_records import StoredPrompts
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.data import DataSettings

Read = Callable[..., tuple[RlData, RlData]]
ROUTED = {"reward_routes": "sums=exact,words=math", "reward_source_key": "of"}


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    """Bytes, with a template."""
    tokenizer: Any = build_bpe_tokenizer(["1+1=2"], 258)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    return HfTokenizer(tokenizer)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with few positions, and held-out rows one of which is trained on."""
    monkeypatch.chdir(tmp_path)
    write("held.jsonl", [{"input": "3+3=", "label": "6", "of": "sums"}, {"input": "9", "label": "9", "of": "sums"}])


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings_of(choice: str, rewards: dict[str, str], **data: Any) -> RlSettings:
    made = RlSettings(model=ModelSettings(pretrain="m"))
    usual: dict[str, Any] = {"data_store": choice, "data_store_path": "store", "eval_data": "held.jsonl"}
    return replace(
        made,
        data=DataSettings(**usual | data),
        batch=BatchSettings(rollout_batch_size=4, n_samples_per_prompt=2, train_batch_size=4),
        reward=replace(made.reward, **rewards),
        sampling=replace(made.sampling, prompt_max_len=40),
    )


@pytest.fixture
def both(tokenizer: HfTokenizer) -> Read:
    """Reads with and without a store."""

    def read(rewards: dict[str, str], **data: Any) -> tuple[RlData, RlData]:
        on, off = (rl_data(settings_of(choice, rewards, **data), tokenizer, 1) for choice in ("on", "off"))
        assert isinstance(on.prompts, StoredPrompts)
        assert list(on.prompts) == list(off.prompts)
        assert list(on.all_prompts()) == [*off.prompts, *off.held_out]
        assert on.held_out == off.held_out
        assert (on.plan, on.num_steps, on.longest_prompt, on.notes) == (
            off.plan,
            off.num_steps,
            off.longest_prompt,
            off.notes,
        )
        assert (on.mixture.sizes, on.mixture.probabilities) == (off.mixture.sizes, off.mixture.probabilities)
        assert on.mixture.order(1, 3).tolist() == off.mixture.order(1, 3).tolist()
        settings = settings_of("on", rewards, **data)
        assert reward_columns(settings, on.all_prompts()) == reward_columns(settings, off.all_prompts())
        return on, off

    return read


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any number are many, and more than three have another order where a store has an order of its own."""
    monkeypatch.setattr(row_store, "_AUTO_BYTES", 0)
    monkeypatch.setattr(row_store, "MOST_IN_MEMORY", 3)


def sums(count: int = 12) -> list[dict[str, Any]]:
    return [{"input": f"{n}+{n}=", "label": str(2 * n), "of": "sums", "n": n, "x": [n / 3, None]} for n in range(count)]


def test_prompts_labels_columns_and_their_order_are_those_of_a_run_without_a_store(both: Read) -> None:
    write("sums.jsonl", [*sums(), {**sums()[0], "input": "1" * 60}, {**sums()[5], "late": "\u00e9\U0001f600"}])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    write("words.jsonl", [{"input": talk, "label": {"a": [1, 2.5]}, "of": "words"}] * 5)
    rows = {"prompt_data": "sums.jsonl,words.jsonl", "prompt_data_probs": "0.25,0.75"}
    on, _ = both(ROUTED, **rows, apply_chat_template=True, system_prompt="s")
    assert on.prompts[3].columns["x"] == [1.0, None]
    assert on.prompts[-1].label == {"a": [1, 2.5]}
    assert "1 of 2 held-out prompts are among the training prompts too" in on.notes
    assert on.stored is not None
    assert on.stored.lines() == [
        "source sums: 13 prompts from sums.jsonl",
        "source words: 5 prompts from words.jsonl",
        f"18 of 19 rows fit (longest prompt {on.stored.longest} tokens)",
        f"tokens are mapped from the data store {on.stored.stored.directory}",
        f"left out, longer than 40 tokens: sums:12 ({60 + len('system:s;user:;')})",
    ]


def test_columns_that_nothing_reads_are_told_and_not_kept(both: Read) -> None:
    write("sums.jsonl", sums())
    on, _ = both({"reward": "exact"}, prompt_data="sums.jsonl")
    assert "sums: not used: of, n, x" in on.notes
    assert on.prompts[0].columns == {}


def test_rows_of_a_published_form_are_read_by_it_in_every_block(both: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "in_this_process", partial(in_this_process, rows_of_block=2))
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(6)]
    rows[4] = {"prompt": "?", **rows[4]}
    write("gsm.jsonl", rows)
    on, _ = both({"reward": "exact"}, prompt_data="gsm.jsonl", eval_data="")
    assert (on.prompts[4].text, on.prompts[4].label) == ("4?", "4")


def test_rows_that_all_lack_a_label_have_none_where_no_reward_compares(both: Read, tokenizer: HfTokenizer) -> None:
    rows = [{"input": f"{n}"} for n in range(6)]
    write("bare.jsonl", rows)
    rewards = {"reward": "length"}
    on, _ = both(rewards, prompt_data="bare.jsonl", eval_data="")
    assert on.prompts[0].label is None
    write("bare.jsonl", [*rows, {"input": "7", "label": "7"}])
    for choice, code in (("on", "data.label_in_some_rows"), ("off", "data.missing_field")):
        with pytest.raises(DataError, match=r"label") as caught:
            rl_data(settings_of(choice, rewards, prompt_data="bare.jsonl", eval_data=""), tokenizer, 1)
        assert caught.value.problem.code == code
    with pytest.raises(DataError, match="no field 'label'"):
        rl_data(settings_of("on", {"reward": "exact"}, prompt_data="bare.jsonl", eval_data=""), tokenizer, 1)


def test_a_row_without_a_route_is_told_by_file_and_line(tokenizer: HfTokenizer) -> None:
    write("sums.jsonl", [*sums(3), {**sums()[0], "of": "other"}])
    found: list[DataError] = []
    for choice in ("on", "off"):
        with pytest.raises(DataError, match="other") as caught:
            rl_data(settings_of(choice, ROUTED, prompt_data="sums.jsonl"), tokenizer, 1)
        found.append(caught.value)
    assert found[0].problem == found[1].problem
    assert found[0].problem.where == "sums.jsonl:4:of"


def test_prompts_that_are_all_too_long_are_refused_with_the_length_that_keeps_them(tokenizer: HfTokenizer) -> None:
    write("long.jsonl", [{"input": "1" * 50, "label": "1"}])
    found: list[DataError] = []
    for choice in ("on", "off"):
        with pytest.raises(DataError) as caught:
            rl_data(settings_of(choice, {}, prompt_data="long.jsonl"), tokenizer, 1)
        found.append(caught.value)
    assert found[0].problem == found[1].problem
    assert found[0].problem.do == "--prompt_max_len 50"


def test_what_no_store_can_hold_is_refused_by_the_reason(tokenizer: HfTokenizer) -> None:
    write("sums.jsonl", sums())
    settings = settings_of("on", {"reward": "exact"}, prompt_data="sums.jsonl")
    tools = replace(settings, conversation=replace(settings.conversation, environment="calculator"))
    some = replace(settings, data=replace(settings.data, max_samples=3))
    for refused, reason in ((tools, "the tools of an environment"), (some, "max_samples = 3")):
        with pytest.raises(OptionsError, match=reason) as caught:
            rl_data(refused, tokenizer, 1)
        assert caught.value.problem.do == "--data_store off"


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("rewards", [ROUTED, {"reward": "exact"}])
def test_a_store_that_is_made_by_default_has_hash_and_order_of_rows_in_memory(
    tokenizer: HfTokenizer, rewards: dict[str, str]
) -> None:
    late = {**sums()[5], "label": "\u00e9\U0001f600", "x": [float("1e-320"), -0.0]}
    write("sums.jsonl", [*sums(), {**sums()[0], "input": "1" * 60}, late])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    write("words.jsonl", [{"input": talk, "label": "1", "of": "words"}] * 5)
    rows = {"prompt_data": "sums.jsonl,words.jsonl", "apply_chat_template": True}
    auto, off, on = (rl_data(settings_of(choice, rewards, **rows), tokenizer, 1) for choice in ("auto", "off", "on"))
    assert auto.stored is not None
    assert list(auto.prompts) == list(off.prompts)
    assert auto.data_hash == off.data_hash != on.data_hash
    assert auto.mixture.order(1, 3).tolist() == off.mixture.order(1, 3).tolist()
    assert [int(index) for index in auto.mixture.sequence(1, 3)] != [int(index) for index in on.mixture.sequence(1, 3)]
    again = rl_data(settings_of("auto", rewards, **rows), tokenizer, 1)
    assert again.data_hash == off.data_hash
    assert list(Path("store").rglob("rows.content")) == []


def test_a_store_of_bytes_beyond_those_of_earlier_runs_in_memory_has_the_hash_that_it_had(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "_AUTO_BYTES", 0)
    monkeypatch.setattr(row_store, "_OWN_HASH_BYTES", 0)
    write("sums.jsonl", sums())
    auto, on = (
        rl_data(settings_of(choice, {"reward": "exact"}, prompt_data="sums.jsonl"), tokenizer, 1)
        for choice in ("auto", "on")
    )
    assert auto.data_hash == on.data_hash
