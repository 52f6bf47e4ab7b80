"""The start of a run on many rows: prompts of `rl`, or prompts and responses of `sft`, with and without the data store.

    python benchmarks/data_start.py rl                  # 1,000,000 prompts; results/data_start.json
    python benchmarks/data_start.py sft --megabytes 1000 --cases first again

A case is a process of its own, which reads the rows and makes the first epoch's order; `first` builds the store that
`again` takes, and `memory` has none. CPU seconds are of the process and its children, MiB the largest resident size
beside what it had when tokenizer and modules were loaded. **The gate:** all cases agree on the SHA-256 of the hash of
the data, 10,000 rows of the epoch and their tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from store import cpu_seconds, peak

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
RESULTS = Path(__file__).parent / "results" / "data_start.json"
CASES = {"memory": "off", "first": "auto", "again": "auto"}
NUM_READ, SEED, MAX_LEN = 10_000, 1, 2048
RESPONSE_WORDS = 180


def main() -> None:
    """Run the cases one after the other and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("rl", "sft"))
    parser.add_argument("--rows", type=int, default=1_000_000, help="prompts of rl")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the rows of sft")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", type=int, default=0, help="--data_store_workers")
    parser.add_argument("--temporary", type=Path, help="where the rows are made, and removed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--case", nargs=2, help="CASE FOLDER: one measurement, told as JSON")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measured(given.kind, given.case[0], Path(given.case[1]), given.workers)))
        return
    with tempfile.TemporaryDirectory(dir=given.temporary) as folder:
        found = compared(given, Path(folder))
    before = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.write_text(json.dumps({**before, given.kind: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def compared(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the rows, and return the figures of every case."""
    file = folder / "rows.jsonl"
    num_rows = make_prompts(file, given.rows) if given.kind == "rl" else make_texts(file, given.megabytes * 10**6)
    make_tokenizer(folder / "tokenizer")
    size = file.stat().st_size
    cases: dict[str, Any] = {}
    for case in given.cases:
        words = [sys.executable, __file__, given.kind, "--case", case, str(folder), "--workers", str(given.workers)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        cases[case] = json.loads(done.stdout.splitlines()[-1])
    digests = {one.pop("digest") for one in cases.values()}
    assert len(digests) == 1, f"the cases have different data: {digests}"
    return {"rows": num_rows, "megabytes": round(size / 1e6, 1), "cases": cases, "digest": digests.pop()}


def make_prompts(file: Path, num_rows: int) -> int:
    """Write word problems with labels, 100 bytes each or so."""
    draw = random.Random(SEED)
    words = ["apples", "days", "Tom", "price", "each", "buys", "gives", "total", "if", "he"]
    with file.open("w") as stream:
        for number in range(num_rows):
            a, b = draw.randrange(1000), draw.randrange(1000)
            text = f"{' '.join(draw.choices(words, k=6))} {a} and {b}, how many of {number}?"
            stream.write(json.dumps({"input": text, "label": str(a + b)}) + "\n")
    return num_rows


def make_texts(file: Path, size: int) -> int:
    """Write prompts and responses, a kilobyte a row, until the file has the size."""
    draw = random.Random(SEED)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(5000)]
    # lines are drawn from a pool of texts: drawing every word of 10 GB takes longer than reading them
    pool = [" ".join(draw.choices(words, k=RESPONSE_WORDS // 6)) for _ in range(20_000)]
    num_rows = written = 0
    with file.open("w") as stream:
        while written < size:
            row = {"input": f"{num_rows} {draw.choice(pool)[:120]}", "response": " ".join(draw.choices(pool, k=5))}
            written += stream.write(json.dumps(row) + "\n")
            num_rows += 1
    return num_rows


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and pairs."""
    from rft_models.tiny_models.text import build_bpe_tokenizer

    build_bpe_tokenizer([f"how many apples does Tom have if he buys {n}?" for n in range(2000)], 1000).save_pretrained(
        str(folder)
    )


def measured(kind: str, case: str, folder: Path, workers: int) -> dict[str, Any]:
    """Return the figures of one start, and the digest of what it found."""
    import pyarrow  # noqa: F401

    from rft.build.shared_parts import make_ledger
    from rft_models.tokenization.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    read = {"rl": read_prompts, "sft": read_texts}[kind]
    resident, cpu, begin = peak(), cpu_seconds(), time.perf_counter()
    data, rows = read(folder, CASES[case], workers, tokenizer)
    ledger = make_ledger(data.mixture, data.data_hash, len(rows), 1, SEED)
    entries = ledger.reserve(256)
    seconds, used, most = time.perf_counter() - begin, cpu_seconds() - cpu, peak()
    entries += ledger.reserve(NUM_READ)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "mib_above": round(most - resident),
        "mib_at_begin": round(resident),
        "mib_of_largest_child": round(peak(resource.RUSAGE_CHILDREN)),
        "stored": data.stored is not None,
        "digest": digest(data.data_hash, [rows[entry.prompt_index] for entry in islice(entries, NUM_READ)]),
    }


def read_prompts(folder: Path, choice: str, workers: int, tokenizer: Any) -> tuple[Any, Sequence[Any]]:
    """Return the data of an `rl` run, and its prompts."""
    from rft.build.rl_data import rl_data
    from rft.settings import RlSettings
    from rft_models.settings import ModelSettings
    from rft_trainer.settings.data import DataSettings

    made = RlSettings(model=ModelSettings(pretrain="none"))
    data = DataSettings(**_places(folder, choice, workers))
    settings = replace(
        made,
        data=data,
        reward=replace(made.reward, reward="exact"),
        sampling=replace(made.sampling, prompt_max_len=256),
    )
    found = rl_data(settings, tokenizer, 1)
    return found, found.prompts


def read_texts(folder: Path, choice: str, workers: int, tokenizer: Any) -> tuple[Any, Sequence[Any]]:
    """Return the data of an `sft` run, and its samples."""
    from rft.settings import SftSettings
    from rft.stages.sft import sft_data
    from rft_models.settings import ModelSettings
    from rft_trainer.settings.data import SftDataSettings

    data = SftDataSettings(**_places(folder, choice, workers), output_key="response")
    found = sft_data(SftSettings(model=ModelSettings(pretrain="none"), data=data), tokenizer, MAX_LEN)
    return found, found.samples


def _places(folder: Path, choice: str, workers: int) -> dict[str, Any]:
    return {
        "prompt_data": str(folder / "rows.jsonl"),
        "data_store": choice,
        "data_store_path": str(folder / "store"),
        "data_store_workers": workers,
    }


def digest(data_hash: str, rows: Sequence[Any]) -> str:
    """Return the SHA-256 of the hash of the data and of rows: names, tokens, and text and label of prompts."""
    found = hashlib.sha256(data_hash.encode())
    for row in rows:
        name = row.prompt_id if hasattr(row, "prompt_id") else row.sample_id
        found.update(json.dumps([name, list(row.token_ids), getattr(row, "label", None)]).encode())
    return found.hexdigest()


if __name__ == "__main__":
    main()
