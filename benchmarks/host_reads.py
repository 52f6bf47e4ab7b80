"""Where an optimizer step on a GPU makes the host wait: every place, and how often a step.

    python benchmarks/host_reads.py [--commands pretrain sft rl] [--device cuda] [--small]

torch tells of operations that wait for the device (`torch.cuda.set_sync_debug_mode`); counted are those of steps 3 to
5, by the innermost line of this project's code, in a run with two micro-batches a step and in one with four, which
tells what grows with them. The last line is `reads_a_micro_batch=<x> and <y> a step, in <command>`, of the worst
command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from memory_plan import CASES, SMALL, make_data, make_model, rewarded, settings_of

RESULTS = Path(__file__).resolve().parent / "results" / "host_reads_gpu.json"
FIRST, LAST = 3, 5
COMMANDS = {"pretrain": "pretrain_amp", "sft": "sft_bf16", "dpo": "dpo_bf16", "rl": "rl_bf16"}


def reads(command: str, num_micro: int, chosen: argparse.Namespace) -> dict[str, float]:
    """Waits a step, by place."""
    import torch

    import rft

    case = dict(CASES[COMMANDS[command]])
    case |= {"context": 256, "micro": 4, "batch": 4 * num_micro, "settings": {**case["settings"]}}
    case["model"] = {**case["model"], "layers": 2, **(SMALL if chosen.small else {})}
    if command == "rl":
        case |= {"batch": 16, "micro": 16 // num_micro}
    places: Counter[str] = Counter()
    counting = False

    def note(message: Any, *_: Any, **__: Any) -> None:
        if counting and "synchroniz" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/rft" in frame.filename]
            frames = [frame for frame in frames if "benchmarks" not in frame.filename]
            place = frames[-1] if frames else traceback.extract_stack()[-2]
            places[f"{place.filename.split('/src/')[-1]}:{place.lineno} {place.name}: {place.line}"] += 1

    class Watch(rft.Callback):
        def on_step(self, run: rft.Run, step: int, metrics: Any) -> None:
            nonlocal counting
            counting = FIRST - 1 <= step < LAST

    with tempfile.TemporaryDirectory() as written, warnings.catch_warnings():
        folder = Path(written)
        model = make_model(case["model"], case["context"] + 8, folder / "model")
        given = settings_of({**case, "command": command}, model, make_data(case, folder), folder, chosen.device)
        given |= {"max_steps": LAST + 1, **({} if command == "rl" else {"max_epochs": 100})}
        source, data = given.pop("pretrain"), given.pop("prompt_data")
        more: dict[str, Any] = {"callbacks": [Watch()], "panel": False}
        warnings.simplefilter("always")
        warnings.showwarning = note
        if chosen.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            if command == "pretrain":
                rft.pretrain(data, model=source, **more, **given)
            elif command == "rl":
                rft.rl(source, data, rewarded, **more, **given)
            else:
                {"sft": rft.sft, "dpo": rft.dpo}[command](source, data, **more, **given)
        finally:
            if chosen.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    steps = LAST - FIRST + 1
    return {place: number / steps for place, number in places.most_common()}


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", default=["pretrain", "sft", "rl"], choices=list(COMMANDS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the program; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    import torch

    found: dict[str, Any] = {}
    for command in chosen.commands:
        two, four = (reads(command, number, chosen) for number in (2, 4))
        rows = {place: {"two": two.get(place, 0.0), "four": four.get(place, 0.0)} for place in {**two, **four}}
        each = (sum(four.values()) - sum(two.values())) / 2
        found[command] = {"a_micro_batch": each, "a_step": sum(two.values()) - 2 * each, "places": rows}
        for place, row in sorted(rows.items(), key=lambda item: -item[1]["two"]):
            print(f"{command:<9} {row['two']:6.1f} with two, {row['four']:6.1f} with four micro-batches  {place}")
        print(f"{command:<9} {each:.1f} a micro-batch, {found[command]['a_step']:.1f} a step beside", flush=True)
    if not chosen.small:
        card = torch.cuda.get_device_name() if chosen.device == "cuda" else "none"
        chosen.output.write_text(json.dumps({"card": card, "torch": torch.__version__, **found}, indent=1) + "\n")
    worst = max(found, key=lambda command: found[command]["a_micro_batch"])
    row = found[worst]
    print(f"reads_a_micro_batch={row['a_micro_batch']:.1f} and {row['a_step']:.1f} a step, in {worst}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
