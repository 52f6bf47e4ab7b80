"""Every setting of `genrec sid` and `genrec eval`, and what `genrec sft` and `genrec rl` have beside sft and rl.

Each has a row: a value that is not the default, and where it shows beside the same command without it. What commands
share with sft and rl has its row in tests/cli/test_flag_walk.py; what the catalogue decides is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.config.schema import schema
from rft.process import launching
from rft.settings import TokenizerOutputSettings, TrainTokenizerSettings
from rft.tiny_models.new_tokenizer import new_tokenizer
from rft_cli.config.resolve import resolve
from rft_cli.main import main
from rft_core.errors import RftError
from rft_dist.launch.spawn import Ended
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.evaluation.model_ranker import ModelRanker
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import ModelRecord
from rft_genrec.settings import rl_rules, rules
from rft_genrec.training import rl, sft
from rft_models.new_decoders.build import build_new_decoder
from rft_models.settings import DecoderSettings, TokenizerSettings
from rft_models.tokenization.added_tokens import with_added_tokens
from rft_models.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("genrec_walk")

NUM_ITEMS = 30


@dataclass(frozen=True, slots=True)
class Row:
    """A value of a setting, and where it shows."""

    words: str
    seen: str = "files"
    """files, variables, calls, code, or refused:<code of the problem>."""
    given: str = ""
    """Flags of both commands."""


RQVAE = "--method rqvae --latent_dim 4 --hidden_dims 8 --vae_epochs 4"
PLUS = "--method rqkmeans_plus --hidden_dims 8 --vae_epochs 2"
MIXED = "--mix_with transitions"
SID = {
    "catalogue": Row("--catalogue {other}", "refused:genrec.no_vectors"),
    "embeddings": Row("--embeddings {place}/second.npy"),
    "item_meta_path": Row("--item_meta_path {other}/ring.item.json", given="--embeddings {place}/second.npy"),
    "new_items": Row("--new_items {other}/ring.item.json", "refused:genrec.no_vectors"),
    "zero_vectors": Row("--zero_vectors keep", "code", "--embeddings {place}/zeros.npy"),
    "method": Row("--method rqkmeans_balanced"),
    "levels": Row("--levels 1"),
    "codes": Row("--codes 4,8"),
    "collisions": Row("--collisions extra", given="--levels 1"),
    "sinkhorn_epsilon": Row("--sinkhorn_epsilon 50", given="--levels 1 --collisions sinkhorn"),
    "kmeans_iterations": Row("--kmeans_iterations 1", given="--embeddings {place}/second.npy"),
    "codebooks": Row("--codebooks {place}/first.codebooks.safetensors", given=PLUS),
    "device": Row("--device cuda", "device"),
    "latent_dim": Row("--latent_dim 3", given=RQVAE),
    "hidden_dims": Row("--hidden_dims 6", given=RQVAE),
    "vae_epochs": Row("--vae_epochs 5", given=RQVAE),
    "vae_batch_size": Row("--vae_batch_size 7", given=RQVAE),
    "vae_learning_rate": Row("--vae_learning_rate 0.1", given=RQVAE),
    "commitment": Row("--commitment 9", given=f"{RQVAE} --vae_learning_rate 0.1"),
    "straight_through": Row("--straight_through per_level", given=f"{RQVAE} --vae_learning_rate 0.1"),
    "revive_epochs": Row("--revive_epochs 1", given=f"{RQVAE} --vae_epochs 40 --vae_learning_rate 0.1"),
    "save_path": Row("--save_path elsewhere"),
    "overwrite": Row("--overwrite", "code", "--save_path {full}"),
    "held_out_share": Row("--held_out_share 0.3"),
    "neighbours": Row("--neighbours 3"),
    "seed": Row("--seed 7"),
}
EVAL = {
    "catalogue": Row("--catalogue {turned}"),
    "sid_index_path": Row("--sid_index_path {place}/other.index.json", "refused:genrec.other_ids"),
    "item_meta_path": Row("--item_meta_path {place}/few.item.json", "refused:genrec.other_items"),
    "pretrain": Row("--pretrain {second}"),
    "bf16": Row("--bf16"),
    "model_code": Row("--model_code absent.py", "code"),
    "device": Row("--device cuda", "device"),
    "num_beams": Row("--num_beams 5"),
    "beam_mass": Row("--beam_mass vocabulary"),
    "search_batch_size": Row("--search_batch_size 7", "calls"),
    "split": Row("--split valid"),
    "max_eval_samples": Row("--max_eval_samples 5"),
    "ks": Row("--ks 1,3"),
    "bootstrap_draws": Row("--bootstrap_draws 30"),
    "baselines": Row("--baselines popularity"),
    "fit_on": Row("--fit_on train+valid"),
    "sasrec": Row("--sasrec kept", given="--baselines sasrec --max_eval_samples 3"),
    "mix_with": Row(MIXED),
    "mix_weight": Row("--mix_weight 0.7", given=MIXED),
    "mix_samples": Row("--mix_samples 3", "calls", MIXED),
    "output": Row("--output elsewhere"),
    "seed": Row("--seed 7"),
    "nproc": Row("--nproc 2", "calls"),
    "restarts": Row("--restarts 2", "calls"),
    "debug": Row("--debug", "variables"),
}
SEQUENCES = "--rows sequences"
SIMILAR = "--tasks history,similar --item_embeddings {place}/second.npy"
WALKS = "--tasks history,walks"
OWN_SFT = {
    "catalogue": Row("--catalogue {turned}"),
    "sid_index_path": Row("--sid_index_path {place}/other.index.json"),
    "item_meta_path": Row("--item_meta_path {other}/ring.item.json", given="--tasks title"),
    "tasks": Row("--tasks history,title"),
    "rows": Row(SEQUENCES),
    "max_history": Row("--max_history 1"),
    "item_embeddings": Row("--item_embeddings {place}/third.npy", given=SIMILAR),
    "similar_steps": Row("--similar_steps 2", given=SIMILAR),
    "walks_per_item": Row("--walks_per_item 2", given=WALKS),
    "walk_steps": Row("--walk_steps 2", given=WALKS),
    "walk_text_weight": Row("--walk_text_weight 5", given=f"{WALKS} --item_embeddings {{place}}/second.npy"),
    "template": Row("--template instruction"),
    "freeze_llm": Row("--freeze_LLM", given="--pretrain {plain}"),
}
OWN_RL = {
    "catalogue": Row("--catalogue {turned}"),
    "sid_index_path": Row("--sid_index_path {place}/other.index.json", "refused:genrec.other_ids"),
    "item_meta_path": Row("--item_meta_path {other}/ring.item.json"),
    "genrec_reward": Row("--genrec_reward rule"),
    "item_embeddings": Row(
        "--item_embeddings {place}/third.npy",
        given="--genrec_reward rule,semantic --item_embeddings {place}/second.npy",
    ),
    "item_scorer": Row("--item_scorer other:scorer", given="--genrec_reward collaborative --item_scorer some:scorer"),
    "item_scorer_path": Row(
        "--item_scorer_path there", given="--genrec_reward collaborative --item_scorer some:scorer"
    ),
}
DECODER = {
    "family": Row("--family llama"),
    "hidden_size": Row("--hidden_size 32"),
    "num_layers": Row("--num_layers 2"),
    "num_heads": Row("--num_heads 4"),
    "num_kv_heads": Row("--num_kv_heads 1"),
    "ffn_hidden_size": Row("--ffn_hidden_size 8"),
    "use_glu": Row("--no-use_glu"),
    "dropout": Row("--dropout 0.5"),
    "vocab_size": Row("--vocab_size 400"),
    "max_seq_len": Row("--max_seq_len 64"),
    "tie_embeddings": Row("--no-tie_embeddings"),
    "init_std": Row("--init_std 0.1"),
    "use_moe": Row("--use_moe"),
    "num_experts": Row("--num_experts 4", given="--use_moe"),
    "top_k": Row("--top_k 1", given="--use_moe"),
    "shared_experts": Row("--shared_experts 1", given="--use_moe"),
}
ACTS = {"genrec-sid": SID, "genrec-eval": EVAL}
PREPARES = {"genrec-sft": OWN_SFT | DECODER, "genrec-rl": OWN_RL}


@dataclass(frozen=True, slots=True)
class Observed:
    """What a command left behind."""

    code: int
    problem: str = ""
    variables: tuple[str, ...] = ()
    """Of the environment, which the command has set."""
    files: tuple[tuple[str, str], ...] = ()
    calls: tuple[Any, ...] = ()


def index_of(shift: int) -> dict[int, list[str]]:
    return {n: [f"<a_{(n + shift) % NUM_ITEMS // 5}>", f"<b_{(n + shift) % 5}>"] for n in range(NUM_ITEMS)}


def write_catalogue(folder: Path, *, step: int = 1, word: str = "item", with_ids: bool = True) -> None:
    folder.mkdir()
    items = {n: {"title": f"{word} {n} of {n % 4}", "description": f"as {n % 7}"} for n in range(NUM_ITEMS)}
    (folder / "ring.item.json").write_text(json.dumps(items))
    if with_ids:
        (folder / "ring.index.json").write_text(json.dumps(index_of(0)))
    for split in ("train", "valid", "test"):
        rows = ["user_id,history_item_id,item_id"]
        shift = {"train": 0, "valid": 7, "test": 3}[split]
        for n in range(NUM_ITEMS):
            taken = [(n * shift + n + place * step) % NUM_ITEMS for place in range(4)]
            rows.append(f'A{n},"{taken[:3]}",{taken[3]}')
        (folder / f"{split}.csv").write_text("\n".join(rows) + "\n")


def write_model(folder: Path, tokens: tuple[str, ...], *, seed: int) -> None:
    place = folder.with_name(f"{folder.name}-tokenizer")
    output = TokenizerOutputSettings(save_path=str(place))
    new_tokenizer(TrainTokenizerSettings(tokenizer=TokenizerSettings(tokenizer_type="bytes"), output=output))
    with_added_tokens(load_tokenizer(place), tokens).save_pretrained(place)
    build_new_decoder(folder, DecoderSettings(hidden_size=16, num_layers=1, num_heads=2), place, seed=seed)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Catalogues, vectors and models by the names that rows have for them."""
    root = tmp_path_factory.mktemp("walk")
    write_catalogue(root / "ring")
    write_catalogue(root / "turned", step=2)
    write_catalogue(root / "bare", with_ids=False)
    write_catalogue(root / "other", word="thing", with_ids=False)
    write_catalogue(root / "full")
    (root / "other.index.json").write_text(json.dumps(index_of(3)))
    (root / "few.item.json").write_text(json.dumps({0: {"title": "one"}}))
    assert main(["genrec", "embed", "--catalogue", str(root / "bare"), "--svd_dim", "6"]) == 0
    drawn = np.random.default_rng(1)
    for name in ("second", "third"):
        np.save(root / f"{name}.npy", drawn.standard_normal((NUM_ITEMS, 6)).astype(np.float32))
    zeros = drawn.standard_normal((NUM_ITEMS, 6)).astype(np.float32)
    zeros[:2] = 0
    np.save(root / "zeros.npy", zeros)
    ids = read_dataset(root / "ring").ids
    assert ids is not None
    for name, seed in (("model", 1), ("second", 2)):
        write_model(root / name, ids.vocabulary, seed=seed)
        ModelRecord.of(PromptBuilder(ids)).write(root / name)
    write_model(root / "plain", (), seed=1)
    words = ["--catalogue", str(root / "bare"), "--save_path", str(root / "made"), "--levels", "2", "--codes", "8"]
    words += ["--method", "rqkmeans_balanced", "--seed", "5", "--held_out_share", "0"]
    assert main(["genrec", "sid", *words]) == 0
    shutil.copy(root / "made" / "ring.codebooks.safetensors", root / "first.codebooks.safetensors")
    names = ("turned", "other", "full", "second", "plain")
    return {f"{{{name}}}": str(root / name) for name in names} | {"{place}": str(root)}


@pytest.fixture(scope="module")
def walk(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Observed]:
    """Runs a command; the same words are run once."""
    known: dict[tuple[str, str], Observed] = {}
    root = places["{place}"]
    base = {
        "genrec-sid": f"--catalogue {root}/bare --save_path out --levels 2 --codes 8 --held_out_share 0 --device cpu",
        "genrec-eval": f"--catalogue {root}/ring --pretrain {root}/model --device cpu --num_beams 6 --output out "
        "--bootstrap_draws 20",
        "genrec-sft": f"--catalogue {root}/ring --device cpu --hidden_size 16 --num_layers 1 --num_heads 2",
        "genrec-rl": f"--catalogue {root}/ring --pretrain {root}/model --device cpu",
    }
    prepare = {"genrec-sft": sft.with_inputs, "genrec-rl": rl.with_inputs}

    def filled(words: str) -> str:
        for name, text in places.items():
            words = words.replace(name, text)
        return words

    def prepared(command: str, words: list[str]) -> Observed:
        try:
            resolved = prepare[command](resolve(command, words))
        except RftError as error:
            return Observed(int(error.exit_code), error.problem.code)
        values = resolved.values
        paths = [Path(text) for name in ("prompt_data", "eval_data") for text in str(values[name]).split(",") if text]
        paths += sorted(path for path in Path(str(values["pretrain"])).iterdir() if path.is_file())
        chosen = {name: str(values[name]) for name in ("constraint", "train_only_tokens_from") if name in values}
        return Observed(0, files=(*digests(paths), *chosen.items()))

    def run(command: str, words: str) -> Observed:
        folder = tmp_path_factory.mktemp("here")
        key = (command, words)
        if key in known:
            return known[key]
        given = shlex.split(f"{base[command]} {filled(words)}")
        if command == "genrec-sft" and "--pretrain" in given:  # its shape is that of the model
            given = [
                word for word in given if word not in ("--hidden_size", "16", "--num_layers", "1", "--num_heads", "2")
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("RFT_CACHE", str(tmp_path_factory.getbasetemp() / "walk-cache"))
            found = prepared(command, given) if command in prepare else acted(patch, command, given, folder)
        known[key] = found
        return found

    return run


def acted(patch: pytest.MonkeyPatch, command: str, given: list[str], folder: Path) -> Observed:
    calls: list[Any] = []

    def start_ranks(_: object, count: int, **__: object) -> Ended:
        calls.append(count)  # what ranks do is seen in test_ranking_commands.py
        return Ended(0, None, (0,) * count, ())

    def supervise(_: object, restarts: int, kept_bytes: object) -> int:
        calls.append(restarts)  # what they do is seen in tests/cli/test_supervised_runs.py
        return 0

    ranked = ModelRanker.rankings

    def counted(self: ModelRanker, histories: Any, *more: Any) -> Any:
        calls.append(len(histories))
        return ranked(self, histories, *more)

    patch.setattr(launching, "spawn_ranks", start_ranks)
    patch.setattr(launching, "supervise", supervise)
    patch.setattr(ModelRanker, "rankings", counted)
    before = set(os.environ)
    code = main([*command.split("-"), *given])
    variables = sorted(set(os.environ) - before)
    for name in variables:
        del os.environ[name]
    return Observed(
        code,
        variables=tuple(variables),
        files=digests(sorted(path for path in folder.rglob("*") if path.is_file()), folder),
        calls=tuple(calls),
    )


def digests(paths: list[Path], folder: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Names and contents; times of an evaluation are not compared."""
    found: list[tuple[str, str]] = []
    for path in paths:
        content = path.read_bytes()
        if path.name == "results.json":
            record = json.loads(content)
            record.pop("seconds", None)
            content = json.dumps(record, sort_keys=True).encode()
        name = str(path.relative_to(folder)) if folder != Path("/") else path.name
        found.append((name, hashlib.sha256(content).hexdigest()))
    return tuple(found)


@pytest.mark.parametrize("command", ACTS)
def test_every_setting_has_a_row(command: str) -> None:
    assert set(ACTS[command]) == set(schema(command))


@pytest.mark.parametrize(("command", "shared"), [("genrec-sft", "sft"), ("genrec-rl", "rl")])
def test_what_a_command_has_beside_the_one_that_it_extends_has_a_row(command: str, shared: str) -> None:
    assert set(PREPARES[command]) == set(schema(command)) - set(schema(shared))


FROM_CATALOGUE = {"genrec-sft": rules._FROM_CATALOGUE, "genrec-rl": rl_rules._FROM_CATALOGUE}
TEXTS: dict[str, str] = {"apply_chat_template": "", "generate_max_len": "7", "max_len": "7", "train_on_turns": "last"}
DECIDED = [(command, name) for command, names in FROM_CATALOGUE.items() for name in names if name in schema(command)]


@pytest.mark.parametrize(("command", "name"), DECIDED)
def test_what_the_catalogue_decides_is_refused(command: str, name: str, places: dict[str, str]) -> None:
    setting = schema(command)[name]
    value = TEXTS.get(name, setting.choices[-1] if setting.choices else "some")
    words = ["--catalogue", places["{turned}"], "--pretrain", f"{places['{place}']}/model", f"--{name}"]
    with pytest.raises(RftError) as refused:
        resolve(command, [*words, *([value] if value else [])])
    problems = getattr(refused.value, "problems", ()) or (refused.value.problem,)
    assert "genrec.rows_of_catalogue" in {problem.code for problem in problems}


CASES = [(command, name) for command, table in (ACTS | PREPARES).items() for name in table]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_setting_acts_or_is_refused(
    command: str, name: str, walk: Callable[..., Observed], capsys: pytest.CaptureFixture[str]
) -> None:
    row = (ACTS | PREPARES)[command][name]
    plain = walk(command, row.given) if not row.seen.startswith(("refused", "device")) else None
    capsys.readouterr()
    changed = walk(command, f"{row.given} {row.words} --json_errors" if command in ACTS else f"{row.given} {row.words}")
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    if error:
        changed = replace(changed, problem=json.loads(error[-1])["problem"]["code"])
    kind, _, detail = row.seen.partition(":")
    if kind == "refused":
        assert (changed.code in (2, 4), changed.problem) == (True, detail)
    elif kind == "device":
        assert torch.cuda.is_available() or (changed.code, changed.problem) == (3, "device.no_cuda")
    else:
        assert plain is not None
        assert getattr(plain, kind) != getattr(changed, kind)
        assert kind == "code" or plain.code == changed.code == 0, changed.problem
