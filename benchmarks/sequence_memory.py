"""What one long context leaves in memory for the backward pass, by the ranks that share it.

    python benchmarks/sequence_memory.py [--context 4096] [--ranks 1,2,4]

One launch of gloo ranks for each number of them, on one decoder of 6 query heads and 2 of keys (which 4 ranks do not
divide). Counted are the bytes of all tensors that the forward pass made and that its result keeps alive: the most of
any rank. They are the same in every run. The last line says what one rank holds over what the largest group holds,
in the worst case; above 1 is less memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from itertools import product
from pathlib import Path

from rft_core.packed_tokens import PackedTokens
from rft_dist.testing.ranks import run_ranks

RESULTS = Path(__file__).resolve().parent / "results" / "sequence_memory.json"
MODES = ("ulysses", "ring")
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def rank(context: int, out: Path) -> None:
    """One process: every mode, with and without recomputed layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
    from rft_dist.strategies.sequence_parallel import SequenceGroup
    from rft_models.policy.load import make_policy
    from rft_models.testing.activation_bytes import held_for_backward

    torch.set_num_threads(1)
    ranks = start_process_group(ranks_from_environment(), torch.device("cpu"))
    config = AutoConfig.for_model("qwen2", **SIZES, max_position_embeddings=context, tie_word_embeddings=True)
    token_ids = torch.arange(context) * 7 % SIZES["vocab_size"]
    given = (token_ids, torch.arange(context), torch.zeros_like(token_ids), torch.arange(context) >= context // 2)
    group, rows = SequenceGroup(ranks, ranks.world_size), []
    for mode, recomputed in product(MODES if ranks.world_size > 1 else ("one rank",), (False, True)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        policy = make_policy(model, None, packed=True, gradient_checkpointing=recomputed).train()
        if ranks.world_size > 1:
            policy.enable_sequence_parallel(group, mode)  # pyright: ignore[reportArgumentType]
        known = [*model.parameters(), *model.buffers(), *given]
        loss, held = held_for_backward(
            lambda policy=policy: policy.token_logprobs(PackedTokens(*given))[0].sum(), known
        )
        loss.backward()
        worst = int(ranks.max(torch.tensor(held)).item())
        rows.append({"mode": mode, "recomputed": recomputed, "bytes": worst, "loss": float(loss)})
    if ranks.rank == 0:
        out.write_text(json.dumps(rows))
    stop_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rank-program", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_program:
        rank(asked.context, asked.rank_program)
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, asked.ranks.split(",")):
            out = Path(folder) / f"{size}.json"
            words = ("--context", asked.context, "--rank-program", out)
            run_ranks(Path(__file__), size, *words, seconds=900)
            cases += [{"ranks": size, **row} for row in json.loads(out.read_text())]
    report(cases, asked.context)


def report(cases: list[dict], context: int) -> None:
    """The table, the file, and the last line."""
    base = {case["recomputed"]: case for case in cases if case["ranks"] == 1}
    print(f"{'ranks':>5}  {'attention':<9}  {'layers':<10}  {'MiB held':>9}  {'of one rank':>11}")
    for case in cases:
        one = base[case["recomputed"]]
        assert abs(case["loss"] - one["loss"]) <= 1e-5 * abs(one["loss"]), (case, one)
        case["share"] = case["bytes"] / one["bytes"]
        layers = "recomputed" if case["recomputed"] else "kept"
        print(
            f"{case['ranks']:>5}  {case['mode']:<9}  {layers:<10}  {case['bytes'] / 2**20:9.2f}  {case['share']:11.3f}"
        )
    facts = {"context": context, "model": SIZES, "python": platform.python_version(), "cases": cases}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
    most = max(case["ranks"] for case in cases)
    worst = max((case for case in cases if case["ranks"] == most), key=lambda case: case["share"])
    where = f"{most} ranks, {worst['mode']}, layers {'recomputed' if worst['recomputed'] else 'kept'}"
    print(f"worst_ratio={1 / worst['share']:.2f} against one rank at {where}")


if __name__ == "__main__":
    main()
