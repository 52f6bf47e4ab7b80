"""Prompts tokenised onto disk and read back: the data store of `rft-train rl` beside `load_dataset` and `map`.

    uv sync --group bench
    python benchmarks/store.py                       # 200,000 rows, 1 and 2 processes, 3 repeats; results/store.json
    python benchmarks/store.py --rows 20000 --repeats 1 --output /tmp/store.json

Both read the same JSON Lines file with the same fast tokenizer and keep text, label and tokens. `build` is from the
file to a store that is closed; `read` opens it in a new process and takes 50,000 rows in one shuffled order. A side is
a process of its own; sides alternate, and every figure is the median of its repeats. Equal SHA-256 of the rows that
were read come before any figure. CPU time counts the processes that a side starts. The peak is that of the side's
process, and beside it of the largest one that it started; `resident` is what the process held before it read anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1"}
RESULTS = Path(__file__).parent / "results" / "store.json"
SIDES = ("rft", "datasets")
NUM_READ = 50_000
WORDS = [
    "the",
    "number",
    "of",
    "apples",
    "that",
    "Tom",
    "has",
    "if",
    "he",
    "buys",
    "gives",
    "each",
    "day",
    "total",
    "price",
]


def main() -> None:
    """Run all sides and write their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--side", nargs=3, help="SIDE STEP PROCESSES: one measurement, told as JSON")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.side:
        side, step, processes = given.side
        print(json.dumps(measured(side, step, int(processes), given.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = compared(Path(folder), given.rows, given.repeats, given.processes)
    given.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(table(found))


def compared(folder: Path, num_rows: int, repeats: int, processes: Sequence[int]) -> dict[str, Any]:
    """Return the medians of every side, step and number of processes."""
    make_inputs(folder, num_rows)
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for count in processes:
            for side in SIDES:
                shutil.rmtree(folder / side, ignore_errors=True)
                rows.setdefault(f"build {count} {side}", []).append(run(side, "build", count, folder))
        for side in SIDES:
            rows.setdefault(f"read 1 {side}", []).append(run(side, "read", 1, folder))
    digests = {row.pop("digest") for name, found in rows.items() if name.startswith("read") for row in found}
    assert len(digests) == 1, "both sides read the same rows"
    cases = {
        name: {key: round(median(row[key] for row in found), 3) for key in found[0]} for name, found in rows.items()
    }
    return {"rows": num_rows, "repeats": repeats, "cores": os.cpu_count(), "digest": digests.pop(), "cases": cases}


def make_inputs(folder: Path, num_rows: int) -> None:
    """Write the rows and a byte-level tokenizer of 1,000 tokens."""
    from rft_models.tiny_models.text import build_bpe_tokenizer

    draw = random.Random(0)
    texts = (
        f"{' '.join(draw.choices(WORDS, k=draw.randint(12, 20)))} {draw.randint(0, 999)}?" for _ in range(num_rows)
    )
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"input": text, "label": str(draw.randint(0, 9999))}) + "\n")
    build_bpe_tokenizer([" ".join(draw.choices(WORDS, k=16)) + f" {n}?" for n in range(2000)], 1000).save_pretrained(
        str(folder / "tokenizer")
    )


def run(side: str, step: str, processes: int, folder: Path) -> dict[str, Any]:
    """Return one measurement of a process of its own."""
    words = [sys.executable, __file__, "--side", side, step, str(processes), "--folder", str(folder)]
    environment = os.environ | {"HF_HOME": str(folder / "datasets")}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measured(side: str, step: str, processes: int, folder: Path) -> dict[str, Any]:
    """Return seconds, CPU seconds, MiB and, of rows that are read, their digest."""
    prepare = {"rft": prepared_rft, "datasets": prepared_datasets}[side]
    build, read = prepare(folder, processes)
    resident, cpu, begin = peak(), cpu_seconds(), time.perf_counter()
    told = {"digest": digest(read())} if step == "read" else {}
    if step == "build":
        build()
    seconds = time.perf_counter() - begin
    return {
        **told,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - cpu,
        "resident_mib": resident,
        "peak_mib": peak(),
        "largest_child_mib": peak(resource.RUSAGE_CHILDREN),
    }


Prepared = tuple[Callable[[], object], Callable[[], Iterator[tuple[Any, Any, Sequence[int]]]]]


def prepared_rft(folder: Path, processes: int) -> Prepared:
    """Return what builds and what reads the data store; modules and tokenizer are loaded."""
    import pyarrow  # noqa: F401

    from rft.tokenizing.stored_prompts import StoredPromptRows, open_prompts
    from rft_models.tokenization.tokenizer import load_tokenizer
    from rft_trainer.settings.data import DataSettings

    tokenizer = load_tokenizer(folder / "tokenizer")
    data = DataSettings(
        prompt_data=str(folder / "rows.jsonl"),
        data_store="on",
        data_store_path=str(folder / "rft"),
        data_store_workers=processes,
    )

    def build() -> StoredPromptRows:
        return open_prompts(data, tokenizer, max_len=512, whole_rows=False, needs_labels=True)

    def read() -> Iterator[tuple[Any, Any, Sequence[int]]]:
        prompts = build().prompts
        for index in order(len(prompts)):
            prompt = prompts[index]
            yield prompt.text, prompt.label, prompt.token_ids

    return build, read


def prepared_datasets(folder: Path, processes: int) -> Prepared:
    """Return what builds and what reads a data set on disk; modules and tokenizer are loaded."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    datasets.disable_progress_bars()

    def build() -> Any:
        rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
        workers = processes if processes > 1 else None
        return rows.map(
            lambda batch: {"input_ids": tokenizer(batch["input"], add_special_tokens=True)["input_ids"]},
            batched=True,
            num_proc=workers,
            new_fingerprint="tokens",
        )

    def read() -> Iterator[tuple[Any, Any, Sequence[int]]]:
        rows = build()  # from its cache
        for index in order(len(rows)):
            row = rows[index]
            yield row["input"], row["label"], row["input_ids"]

    return build, read


def order(num_rows: int) -> list[int]:
    """Return the rows that are read, in one shuffled order."""
    return random.Random(1).sample(range(num_rows), min(NUM_READ, num_rows))


def digest(rows: Iterator[tuple[Any, Any, Sequence[int]]]) -> str:
    """Return the SHA-256 of texts, labels and tokens."""
    found = hashlib.sha256()
    for text, label, ids in rows:
        found.update(json.dumps([text, label, list(ids)]).encode())
    return found.hexdigest()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak(whose: int = resource.RUSAGE_SELF) -> float:
    """Return the largest resident size in MiB."""
    return resource.getrusage(whose).ru_maxrss / 1024


def table(found: dict[str, Any]) -> str:
    """Return the rows as a table, and the worst ratio."""
    lines = [
        "| case | rows/s, store | rows/s, datasets | CPU us a row, store | datasets | peak MiB, store | datasets |",
        "|---|---|---|---|---|---|---|",
    ]
    worst = (float("inf"), "")
    for case in dict.fromkeys(name.rpartition(" ")[0] for name in found["cases"]):
        ours, theirs = (found["cases"][f"{case} {side}"] for side in SIDES)
        num_rows = min(NUM_READ, found["rows"]) if case.startswith("read") else found["rows"]
        speeds = [f"{num_rows / side['seconds']:,.0f}" for side in (ours, theirs)]
        costs = [f"{side['cpu_seconds'] / num_rows * 1e6:.1f}" for side in (ours, theirs)]
        peaks = [f"{side['peak_mib']:,.0f} (from {side['resident_mib']:,.0f})" for side in (ours, theirs)]
        lines.append(f"| {case} | {' | '.join((*speeds, *costs, *peaks))} |")
        worst = min(worst, (theirs["seconds"] / ours["seconds"], case))
    return "\n".join((*lines, "", f"worst_ratio={worst[0]:.2f} against datasets at {worst[1]}"))


if __name__ == "__main__":
    main()
