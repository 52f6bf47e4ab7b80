"""Names of the Hub in settings: which texts are names, and what takes their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.hub.hub_names import dataset_name, model_name, rewritten, with_directories, with_recorded_commits

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "v1.0"),
        ("Qwen/Qwen3-0.6B@refs/pr/3", "Qwen/Qwen3-0.6B", "refs/pr/3"),
        (f"a/b@{COMMIT}", "a/b", COMMIT),
    ],
)
def test_a_model_is_an_organisation_a_name_and_a_revision(text: str, repo: str, revision: str) -> None:
    name = model_name(text)
    assert name is not None
    assert (name.repo, name.revision, str(name)) == (repo, revision, text)
    assert name.commit == (revision if revision == COMMIT else "")


@pytest.mark.parametrize("text", ["", "gpt2", "./a/b", "/a/b", "~/a/b", "a/b/c", "../a", "a/b@", "a/b:c", "a b/c"])
def test_other_texts_are_no_models(text: str) -> None:
    assert model_name(text) is None


def test_a_data_set_has_configuration_split_and_revision_each_or_none() -> None:
    parts = []
    for text in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:train@refs/convert/parquet", "a/b@v1"):
        name = dataset_name(text)
        assert name is not None
        assert str(name) == text
        parts.append((name.config, name.split, name.revision))
    assert parts == [("", "", ""), ("main", "", ""), ("main", "train", "refs/convert/parquet"), ("", "", "v1")]


@pytest.mark.parametrize("text", ["data/train.jsonl", "data/x.parquet", "x/y.jsonl.gz", "sums:100", "data/*.jsonl"])
def test_a_file_that_is_not_there_is_no_data_set(text: str) -> None:
    assert dataset_name(text) is None


def test_what_exists_is_a_path_and_a_folder_of_the_organisations_name_makes_one(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert model_name("models/tiny") is None
    assert model_name("models/tyni") is None, "a typing error in a path is none of the Hub's business"
    assert dataset_name("models/tyni") is None
    name = model_name("models/tyni@main")
    assert name is not None, "a revision says that the Hub is meant"
    assert name.repo == "models/tyni"


def test_names_are_replaced_in_every_setting_that_takes_them() -> None:
    values: dict[str, Any] = {
        "pretrain": "a/policy",
        "critic_pretrain": "/here/critic",
        "reward_pretrain": "a/first,good=a/second@v2,/here/third",
        "judge_pretrain": "",
        "prompt_data": "x.jsonl, openai/gsm8k:main",
        "seed": 1,
    }
    changed = rewritten(values, lambda name, setting: f"{name}#{setting}")
    assert changed == {
        "pretrain": "a/policy#pretrain",
        "reward_pretrain": "a/first#reward_pretrain,good=a/second@v2#reward_pretrain,/here/third",
        "prompt_data": "x.jsonl,openai/gsm8k:main#prompt_data",
    }
    assert with_directories(values, lambda name, setting: f"/cache/{name.repo[-3:]}") == {
        "pretrain": "/cache/icy",
        "reward_pretrain": "first=/cache/rst,good=/cache/ond,/here/third",
    }, "a reward model keeps the label of its name"


def test_a_name_without_a_revision_takes_the_commit_of_the_record() -> None:
    recorded = {"pretrain": f"a/policy@{COMMIT}", "prompt_data": f"x.jsonl,openai/gsm8k:main@{COMMIT}", "seed": 1}
    same = {"pretrain": "a/policy", "prompt_data": "x.jsonl,openai/gsm8k:main", "seed": 1}
    assert with_recorded_commits(same, recorded) == {
        "pretrain": f"a/policy@{COMMIT}",
        "prompt_data": f"x.jsonl,openai/gsm8k:main@{COMMIT}",
    }
    assert with_recorded_commits({"pretrain": "a/policy@v2", "prompt_data": "b/other"}, recorded) == {}
