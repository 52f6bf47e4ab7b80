"""H1, H2, H4: damaged and forged files of every format are read, or refused by name, in bounded memory."""

from __future__ import annotations

import json
import os
import resource
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support import hostile_files
from support.audit_events import counted_events
from support.hostile_files import HostileFile

from rft.config import yaml_file
from rft.config.schema import schema
from rft_core.errors import RftError
from rft_dist.checkpoints.reader import newest_verified, open_verified
from rft_dist.checkpoints.store import CheckpointStore
from rft_models.files.directories import checked_model_directory
from rft_models.files.safetensors_reader import WeightFiles
from rft_models.files.transformers_config import hf_config
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_trainer.data.readers.formats import read_file
from rft_trainer.runs.reader import read_run

MOST_MEMORY = 512 << 20
"""Bytes that all files of a format together may add to what this process takes."""
RUNS_CODE = ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "os.posix_spawn", "socket.connect")
"""What the interpreter tells of when somebody's code is looked up or run."""
ROWS = [
    {
        "prompt": f"what is {number} + 1, \u00e4?",
        "label": str(number + 1),
        "more": {"a": [number, 2], "b": None},
        "share": 0.5,
    }
    for number in range(5)
]
PLAIN = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]


def data_file(folder: Path, suffix: str) -> HostileFile:
    file = folder / f"rows{suffix}"
    text = ["prompt,label", *(f'"{row["prompt"]}",{row["label"]}' for row in PLAIN)]
    content: dict[str, Callable[[], bytes]] = {
        ".jsonl": lambda: "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        ".json": lambda: json.dumps(ROWS).encode(),
        ".csv": lambda: "\n".join(text).encode(),
        ".tsv": lambda: "\n".join(text).replace(",", "\t").encode(),
        ".parquet": lambda: hostile_files.parquet_bytes(ROWS),
        ".arrow": lambda: hostile_files.arrow_bytes(ROWS),
    }
    valid = content[suffix]()
    forged = {".json": hostile_files.structured, ".parquet": hostile_files.binary, ".arrow": hostile_files.binary}
    return HostileFile(file, forged.get(suffix, hostile_files.raw)(valid), lambda: read_file(file))


def model_file(folder: Path, name: str) -> HostileFile:
    """A file of a model's directory, with the readers of all of them."""
    build_character_model(folder, alphabet="0123456789+-= ", hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)

    def weights() -> object:
        checked_model_directory(folder)
        files = WeightFiles(folder)
        try:
            return [files.block(each, (0,) * len(files._shapes[each]), files._shapes[each]) for each in files.names()]
        finally:
            files.close()

    def tokenizer() -> object:
        loaded = load_tokenizer(folder)
        return loaded.decode(loaded.encode("1 + 2 = 3")), loaded.digest, loaded.pad_id

    def config() -> object:
        checked_model_directory(folder)
        return hf_config(folder)

    readers = {"model.safetensors": weights, "config.json": config}
    place = folder / name
    valid = place.read_bytes()
    forged = hostile_files.safetensors(valid) if name == "model.safetensors" else hostile_files.structured(valid)
    return HostileFile(place, forged, readers.get(name, tokenizer))


def settings_file(folder: Path) -> HostileFile:
    file = folder / "settings.yaml"
    text = "recipe:\n  command: sft\nseed: 42\npretrain: model\nadam_betas: [0.9, 0.95]\nrun:\n  save_path: runs/x\n"
    known = schema("sft")
    return HostileFile(file, hostile_files.raw(text.encode()), lambda: yaml_file.read(file, known))


def saved_checkpoint(folder: Path) -> Path:
    store = CheckpointStore(folder / "checkpoints", keep_last=None, keep_bytes=None, run_id="forged")
    store.save(
        1,
        tensors={"optimizer": {"moment": torch.zeros(4, 3), "count": torch.tensor(3)}},
        records={"ledger": {"epoch": 1, "order": [3, 1, 2]}},
        model_writer=lambda place: (place / "config.json").write_text("{}"),
        metadata={"episode": 1},
    )
    return folder / "checkpoints" / "step_000001"


def checkpoint_file(folder: Path, sharded: bool) -> HostileFile:
    path = saved_checkpoint(folder)
    place = path / "manifest.json"
    valid = place.read_bytes()
    if sharded:
        whole = json.loads(valid)
        block = ["state/optimizer.safetensors", [0, 0], [4, 3]]
        table = {"moment": ["F32", [4, 3], [block]], "count": ["I64", [], [[block[0], [], []]]]}
        whole["manifest"] |= {"format_version": 2, "sharded": {"optimizer": table}}
        valid = json.dumps(whole).encode()

    def read() -> object:
        newest = newest_verified(folder / "checkpoints")
        # put aside by the search where it did not verify
        for aside in (folder / "checkpoints").glob("quarantine_*"):
            aside.rename(path)
        opened = open_verified(path)
        return opened.tensors("optimizer"), opened.records("ledger"), newest

    return HostileFile(place, hostile_files.manifest(valid), read)


def catalogue_file(folder: Path, name: str) -> HostileFile:
    from rft_genrec.catalogue.minionerec_files import read_dataset

    items = {str(n): {"title": f"saw {n}", "description": f"['a saw {n}']", "categories": "Tools"} for n in range(4)}
    index = {str(n): [f"<a_{n}>", "<b_1>"] for n in range(4)}
    head = "user_id,history_item_title,item_title,history_item_id,item_id,history_item_sid,item_sid\n"
    row = "A1,\"['saw 0', 'saw 1']\",saw 2,\"[0, 1]\",2,\"['<a_0><b_1>', '<a_1><b_1>']\",<a_2><b_1>\n"
    files = {
        "tools.item.json": json.dumps(items),
        "tools.index.json": json.dumps(index),
        "train.csv": head + row * 3,
        "info.txt": "".join(f"<a_{n}><b_1>\tsaw {n}\t{n}\n" for n in range(4)),
    }
    for each, text in files.items():
        (folder / each).write_text(text)
    valid = files[name].encode()
    forged = hostile_files.structured(valid) if name.endswith(".json") else hostile_files.raw(valid)
    return HostileFile(folder / name, forged, lambda: read_dataset(folder))


def embedding_file(folder: Path) -> HostileFile:
    from rft_genrec.catalogue.embedding_files import read_embeddings

    file = folder / "tools.emb-x-td.npy"
    np.save(file, np.ones((4, 3), np.float32))
    return HostileFile(file, hostile_files.binary(file.read_bytes()), lambda: read_embeddings(file, 4).sum())


def record_file(folder: Path) -> HostileFile:
    from rft_genrec.prompts.model_record import read_record

    file = folder / "genrec.json"
    valid = json.dumps({"ids": "a", "max_history": 5, "template": "t", "prompt": "p"}).encode()
    return HostileFile(file, hostile_files.structured(valid), lambda: read_record(folder))


def run_file(folder: Path, name: str) -> HostileFile:
    """A file of a run's directory, of which whatever is damaged is passed over."""
    files = {
        "metrics.jsonl": "".join(
            json.dumps({"step": n, "reward/mean": 0.5, "time/step": 1.0}) + "\n" for n in range(9)
        ),
        "summary.json": json.dumps({"outcome": "finished", "eval": {"before": {"accuracy": 0.1}}, "seconds": 9.5}),
        "config.yaml": "recipe:\n  command: rl\nseed: 42   # command line\n",
    }
    for each, text in files.items():
        (folder / each).write_text(text)

    def read() -> object:
        run = read_run(folder)
        return run.outcome, run.step, run.seconds, run.accuracy("before"), run.series("reward/mean"), run.settings

    forged = hostile_files.structured if name == "summary.json" else hostile_files.raw
    return HostileFile(folder / name, forged(files[name].encode()), read)


FORMATS: dict[str, tuple[int, Callable[[Path], HostileFile]]] = {
    "rows.jsonl": (200, lambda folder: data_file(folder, ".jsonl")),
    "rows.json": (200, lambda folder: data_file(folder, ".json")),
    "rows.csv": (200, lambda folder: data_file(folder, ".csv")),
    "rows.tsv": (100, lambda folder: data_file(folder, ".tsv")),
    "rows.parquet": (20, lambda folder: data_file(folder, ".parquet")),
    "rows.arrow": (200, lambda folder: data_file(folder, ".arrow")),
    "settings.yaml": (100, settings_file),
    "model.safetensors": (60, lambda folder: model_file(folder, "model.safetensors")),
    "tokenizer.json": (10, lambda folder: model_file(folder, "tokenizer.json")),
    "tokenizer_config.json": (10, lambda folder: model_file(folder, "tokenizer_config.json")),
    "generation_config.json": (10, lambda folder: model_file(folder, "generation_config.json")),
    "config.json": (60, lambda folder: model_file(folder, "config.json")),
    "manifest": (60, lambda folder: checkpoint_file(folder, False)),
    "manifest of ranks": (60, lambda folder: checkpoint_file(folder, True)),
    "items": (100, lambda folder: catalogue_file(folder, "tools.item.json")),
    "index": (100, lambda folder: catalogue_file(folder, "tools.index.json")),
    "samples": (100, lambda folder: catalogue_file(folder, "train.csv")),
    "info": (100, lambda folder: catalogue_file(folder, "info.txt")),
    "embeddings": (100, embedding_file),
    "genrec.json": (100, record_file),
    "metrics.jsonl": (60, lambda folder: run_file(folder, "metrics.jsonl")),
    "summary.json": (60, lambda folder: run_file(folder, "summary.json")),
    "config.yaml": (60, lambda folder: run_file(folder, "config.yaml")),
}
"""Format -> (files in the test command, where they are and what reads them)."""


def amounts() -> Iterator[Any]:
    share = float(os.environ.get("RFT_NIGHT_SHARE", "1"))
    night = [pytest.mark.night, pytest.mark.timeout(6 * 3600)]
    for name, (few, _) in FORMATS.items():
        yield pytest.param(name, few, id=f"{name}-few")
        yield pytest.param(name, 200, id=f"{name}-more")
        yield pytest.param(name, max(1, round(10_000 * share)), id=f"{name}-night", marks=night)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("name", "number"), list(amounts()))
def test_a_forged_file_is_read_or_refused(name: str, number: int, tmp_path: Path) -> None:
    hostile = FORMATS[name][1](tmp_path)
    valid = hostile.place.read_bytes() if hostile.place.exists() else None
    if valid is not None:
        hostile.read()  # the valid file, which also imports what reading needs
    before, ends, seen, faults = peak_bytes(), Counter[str](), Counter[str](), dict[str, str]()
    with counted_events(seen, RUNS_CODE):
        for seed in range(number):
            content = hostile.forged(Random(f"{name} {seed}"))
            hostile.place.write_bytes(content)
            try:
                hostile.read()
                ends["read"] += 1
            except RftError as error:
                # it says which file, or its folder where it is one of several that do not fit together
                told = error.problem.where + error.problem.what
                if str(tmp_path) not in told and hostile.place.name not in told:
                    faults.setdefault(f"{error.problem.code} names no file", f"seed {seed}: {told}")
                ends[error.problem.code] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/packages/" in frame.filename]
                place = f"{own[-1].filename}:{own[-1].lineno}" if own else "nowhere"
                faults.setdefault(f"{type(error).__name__} of {place}", f"seed {seed}: {error}")
    assert faults == {}
    assert seen == {}
    assert peak_bytes() - before < MOST_MEMORY
    print(f"\n{name}: {number} files, {dict(ends)}, {(peak_bytes() - before) >> 20} MiB more")
