"""`rft-train genrec embed` and `rft-train genrec sid`, one after the other, on a small catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_cli.main import main
from rft_genrec.catalogue.minionerec_files import read_dataset

KINDS = ("steel hammer", "cotton shirt", "glass bottle", "paper box")
WORDS = ["red", "blue", "green", "small", "large", "heavy", "light", "plain", "round", "flat"]


def item(number: int) -> dict[str, str]:
    words = " ".join(WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 7))
    return {"title": f"{KINDS[number % 4]} {words}", "description": f"['a {KINDS[number % 4]} of size {number % 5}']"}


def write_catalogue(folder: Path, num: int = 40) -> Path:
    folder.mkdir()
    (folder / "tools.item.json").write_text(json.dumps({str(number): item(number) for number in range(num)}))
    (folder / "valid.csv").write_text(
        "user_id,history_item_id,item_id,history_item_sid,item_sid\nA1,\"[0, 1]\",2,\"['x', 'y']\",z\n"
    )
    return folder


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def rft_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The program in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Outcome:
        capsys.readouterr()
        code = main(list(words))
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def catalogue(tmp_path: Path, rft_train: Callable[..., Any]) -> Path:
    folder = write_catalogue(tmp_path / "catalogue")
    made = rft_train("genrec", "embed", "--catalogue", str(folder), "--svd_dim", "8")
    assert made.code == 0, made.err
    assert "40 items x 8 numbers by tfidf" in made.out
    return folder


def sid(rft_train: Callable[..., Any], folder: Path, *more: str) -> Any:
    vectors = str(folder / "tools.emb-tfidf.npy")
    words = ("--catalogue", str(folder), "--embeddings", vectors, "--levels", "2", "--codes", "4,8", *more)
    return rft_train("genrec", "sid", *words, "--json_errors")


def test_an_encoder_that_is_not_installed_is_told_before_the_items_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rft_train: Any
) -> None:
    monkeypatch.setattr("rft_genrec.embedding.minilm.PACKAGE", "a_package_that_is_not_installed")
    refused = rft_train("genrec", "embed", "--catalogue", str(tmp_path), "--encoder", "minilm", "--json_errors")
    # an empty directory is no catalogue, which reading it would say
    assert (refused.code, problem(refused)["code"]) == (3, "extra.minilm")


def test_every_item_has_an_id_of_its_own_and_new_ones_leave_it(catalogue: Path, tmp_path: Path, rft_train: Any) -> None:
    made = sid(rft_train, catalogue)
    assert made.code == 0, made.err
    first = read_dataset(catalogue)
    assert first.ids is not None
    assert first.ids.collision_rate == 0 or "share" in made.out
    assert all(len(tokens) == 2 for tokens in first.ids.tokens_by_item)
    report = json.loads((catalogue / "tools.sid.json").read_text())
    assert report["neighbours_share"]["1"] > 2 * report["chance_share"]["1"]
    assert (catalogue / "tools.sid.html").read_text().startswith("<!doctype html>")
    # the columns of the samples follow the new IDs
    row = (catalogue / "valid.csv").read_text().splitlines()[1]
    assert row.endswith(f"\"['{first.ids.text(0)}', '{first.ids.text(1)}']\",{first.ids.text(2)}")
    assert f"{first.ids.text(3)}\t{item(3)['title']}\t3" in (catalogue / "info.txt").read_text()

    again = sid(rft_train, catalogue)
    assert json.loads(again.err.splitlines()[-1])["problem"]["code"] == "genrec.ids_exist"
    other = sid(rft_train, catalogue, "--save_path", str(tmp_path / "same"))
    assert other.code == 0, other.err
    copied = read_dataset(tmp_path / "same")
    assert copied.ids == first.ids, "the seed decides"
    assert [one.history for one in copied.of("valid")] == [(0, 1)]

    new = tmp_path / "new.item.json"
    new.write_text(json.dumps({str(n): item(40 + n) for n in range(3)}))
    encoder = str(catalogue / "tools.emb-tfidf.encoder.safetensors")
    where = ("--catalogue", str(catalogue), "--item_meta_path", str(new), "--save_path", str(tmp_path))
    assert rft_train("genrec", "embed", *where, "--encoder", encoder).code == 0
    vectors = str(tmp_path / "new.emb-tfidf.npy")
    added = rft_train("genrec", "sid", "--catalogue", str(catalogue), "--embeddings", vectors, "--new_items", str(new))
    assert added.code == 0, added.err
    assert "3 items added as 40 to 42" in added.out
    grown = read_dataset(catalogue)
    assert len(grown.catalogue) == 43
    assert grown.ids is not None
    assert grown.ids.tokens_by_item[:40] == first.ids.tokens_by_item
    assert not {*grown.ids.tokens_by_item[40:]} & {*first.ids.tokens_by_item} or "share an ID" in added.out


def problem(outcome: Any) -> dict[str, Any]:
    return json.loads(outcome.err.splitlines()[-1])["problem"]


def test_vectors_and_settings_that_do_not_fit_are_refused(catalogue: Path, tmp_path: Path, rft_train: Any) -> None:
    assert problem(sid(rft_train, catalogue, "--codes", "4,8,8"))["code"] == "genrec.codes"
    assert problem(sid(rft_train, catalogue, "--codes", "64"))["code"] == "genrec.too_many_codes"
    values = np.load(catalogue / "tools.emb-tfidf.npy")
    for name, changed, code in (
        ("few", values[:-1], "genrec.embeddings"),
        ("nan", np.where(np.arange(40)[:, None] == 7, np.nan, values), "genrec.embeddings"),
        ("zeros", np.where(np.arange(40)[:, None] < 2, 0, values), "genrec.zero_vectors"),
    ):
        np.save(tmp_path / f"{name}.npy", changed)
        refused = sid(rft_train, catalogue, "--embeddings", str(tmp_path / f"{name}.npy"))
        assert (refused.code == 4, problem(refused)["code"]) == (True, code)
    assert not list(catalogue.glob("*.index.json")), "what is refused writes no IDs"
    table = json.loads((catalogue / "tools.item.json").read_text())
    table["3"]["title"] = "something else"
    (catalogue / "tools.item.json").write_text(json.dumps(table))
    assert "other items or texts" in problem(sid(rft_train, catalogue))["why"]


@pytest.mark.parametrize("method", ["rqkmeans_balanced", "rqvae", "rqkmeans_plus"])
def test_every_method_gives_ids(method: str, catalogue: Path, rft_train: Any) -> None:
    settings = ("--method", method, "--latent_dim", "4", "--hidden_dims", "8", "--vae_epochs", "4")
    made = sid(rft_train, catalogue, *(settings if method == "rqvae" else settings[:2] + settings[4:]))
    assert made.code == 0, made.err
    dataset = read_dataset(catalogue)
    assert dataset.ids is not None
    assert len(dataset.ids) == 40
    assert ("has no effect" in made.out) == (method == "rqkmeans_balanced")
