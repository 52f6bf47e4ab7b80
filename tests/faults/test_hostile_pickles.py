"""H1: pickles that run a command, put into every file that is read as a model, a checkpoint, data or arrays."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.audit_events import counted_events
from support.hostile_files import arrow_bytes

from rft_core.errors import RftError
from rft_dist.checkpoint_format.file_operations import digest_file
from rft_dist.checkpoint_format.manifest import FileEntry, Manifest
from rft_dist.checkpoints.reader import open_verified, read_manifest
from rft_dist.checkpoints.store import CheckpointStore
from rft_genrec.catalogue.embedding_files import read_embeddings
from rft_genrec.prompts.model_record import read_record
from rft_genrec.semantic_ids.start_codebooks import start_codebooks
from rft_models.files.directories import checked_model_directory
from rft_models.files.safetensors_reader import WeightFiles
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_models.vision.image_files import open_image
from rft_trainer.data.readers.formats import read_rows
from rft_trainer.runs.reader import read_run

UNPICKLING = ("pickle.find_class", "os.system", "subprocess.Popen", "os.posix_spawn", "os.exec")


def payloads(canary: Path) -> dict[str, bytes]:
    """Pickles of which the loading runs a command, as files of several kinds that hold one."""
    command = f"touch {canary}".encode()
    old = b"cos\nsystem\n(S'" + command + b"'\ntR."
    new = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R."
    return {
        "protocol 0": old,
        "protocol 2": b"\x80\x02" + old,
        "protocol 4": new,
        "built in": b'\x80\x02c__builtin__\neval\n(S\'__import__("os").system("' + command + b"\")'\ntR.",
        "torch": zipped({"archive/data.pkl": new, "archive/version": b"3\n", "archive/byteorder": b"little"}),
        "npy": npy(new),
        "npz": zipped({"level_0.npy": npy(new), "codebooks.npy": npy(new)}),
        "compressed": zlib.compress(new),
    }


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def npy(pickled: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (4, 3), }"
    header += b" " * (64 - (10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled


def model_readers(folder: Path) -> list[Callable[[], object]]:
    return [
        lambda: checked_model_directory(folder),
        lambda: load_tokenizer(folder),
        lambda: WeightFiles(folder).close(),
        lambda: load_policy(folder),
        lambda: read_record(folder),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return build_character_model(folder, alphabet="0123456789+-= ", hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)


def tried(canary: Path, place: Path, readers: list[Callable[[], object]], content: bytes) -> Counter[str]:
    """Read a folder in which a file holds `content`: how it ended; nothing of the content has been run."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    ends, seen = Counter[str](), Counter[str]()
    with counted_events(seen, UNPICKLING):
        for read in readers:
            try:
                read()
                ends["read"] += 1
            except RftError as error:
                ends[error.problem.code] += 1
    assert seen == {}
    assert not canary.exists()
    return ends


def test_the_payloads_run_where_somebody_unpickles(tmp_path: Path) -> None:
    for name in ("protocol 0", "protocol 2", "protocol 4", "built in"):
        canary = tmp_path / "canary"
        code = "import sys, pickle; pickle.loads(sys.stdin.buffer.read())"
        subprocess.run([sys.executable, "-c", code], input=payloads(canary)[name], check=True)
        assert canary.exists(), name
        canary.unlink()


OPENED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
BESIDE = ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt", "rng_state.pth", "x.pkl")


@pytest.mark.parametrize("name", [*OPENED, "genrec.json", "model.safetensors.index.json"])
def test_in_the_place_of_a_model_s_file_it_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(model, folder)
    for content in payloads(canary).values():
        ends = tried(canary, folder / name, model_readers(folder), content)
        assert ends.total() > ends["read"], ends


@pytest.mark.parametrize("name", BESIDE)
def test_beside_a_model_s_files_it_is_not_opened(model: Path, tmp_path: Path, name: str) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(model, folder)
    for content in list(payloads(canary).values())[:2]:
        assert set(tried(canary, folder / name, model_readers(folder)[:3], content)) == {"read"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "adapter_model.bin"])
def test_instead_of_weights_it_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    for content in payloads(canary).values():
        assert "read" not in tried(canary, folder / name, [lambda: load_policy(folder)], content)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert set(tried(canary, folder / name, [lambda: load_policy(folder)], content)) == {"models.foreign_shard"}
        (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".pkl", ".pt", ".npz"])
def test_as_data_it_is_refused(tmp_path: Path, suffix: str) -> None:
    canary, file = tmp_path / "canary", tmp_path / f"rows{suffix}"
    for name, content in payloads(canary).items():
        ends = tried(canary, file, [lambda: read_rows(file)], content)
        # a pickle of letters alone is a table of one column and no rows, or of one
        assert "read" not in ends or (suffix in (".csv", ".tsv") and name == "protocol 0"), (name, ends)


def test_in_a_saved_data_set_it_is_refused(tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "set"
    folder.mkdir()
    (folder / "data-0.arrow").write_bytes(arrow_bytes([{"prompt": "a"}]))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    assert len(read_rows(folder)) == 1
    for name in ("state.json", "data-0.arrow", "dataset_dict.json"):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        for content in payloads(canary).values():
            assert "read" not in tried(canary, folder / name, [lambda: read_rows(folder)], content)
        if before is not None:
            (folder / name).write_bytes(before)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".safetensors"])
def test_as_arrays_it_is_refused(tmp_path: Path, suffix: str) -> None:
    canary, file = tmp_path / "canary", tmp_path / f"vectors{suffix}"
    readers: list[Callable[[], object]] = [
        lambda: read_embeddings(file, 4),
        lambda: start_codebooks(str(file), [4], 3),
    ]
    for content in payloads(canary).values():
        assert "read" not in tried(canary, file, readers, content)


def test_as_an_image_it_is_refused(tmp_path: Path) -> None:
    canary, file = tmp_path / "canary", tmp_path / "image.png"
    for content in payloads(canary).values():
        assert "read" not in tried(canary, file, [lambda: open_image(file)], content)


def rehashed(path: Path) -> None:
    """Let the manifest of a checkpoint list its files as they are now."""
    before = read_manifest(path)
    files = tuple(FileEntry(entry.path, digest_file(path / entry.path)) for entry in before.files)
    after = Manifest(
        before.run_id, before.step, before.parent_step, before.sequence, before.components, files, {}, before.created
    )
    (path / "manifest.json").write_bytes(after.to_bytes())


@pytest.mark.parametrize("is_forged", [False, True], ids=["damaged", "with hashes of its own"])
def test_in_every_file_of_a_checkpoint_it_is_refused(tmp_path: Path, is_forged: bool) -> None:
    canary = tmp_path / "canary"
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=None, keep_bytes=None, run_id="pickles")
    store.save(
        1,
        tensors={"optimizer": {"moment": torch.zeros(4, 3)}, "weights": {"w": torch.ones(2)}},
        records={"ledger": {"epoch": 1}},
        model_writer=lambda place: np.save(place / "vectors.npy", np.ones(2)),
        metadata={},
    )
    step = tmp_path / "checkpoints" / "step_000001"
    names = sorted(str(file.relative_to(step)) for file in step.rglob("*") if file.is_file())
    assert len(names) == 5

    def read() -> object:
        found = open_verified(step)
        return found.tensors("optimizer"), found.tensors("weights"), found.records("ledger")

    for name in names:
        original = (step / name).read_bytes()
        listing = (step / "manifest.json").read_bytes()
        for content in payloads(canary).values():
            if is_forged and name != "manifest.json":
                (step / name).write_bytes(content)
                rehashed(step)
            ends = tried(canary, step / name, [read], content)
            # a file that training does not read is a file of the model, whatever is in it
            assert ("read" in ends) == (is_forged and name.startswith("model/")), (name, ends)
            (step / "manifest.json").write_bytes(listing)
        (step / name).write_bytes(original)
    read()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "evals.jsonl", "env.json"])
def test_in_a_file_of_a_run_it_is_passed_over(tmp_path: Path, name: str) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "run"
    for content in payloads(canary).values():
        assert set(tried(canary, folder / name, [lambda: read_run(folder).step], content)) == {"read"}
