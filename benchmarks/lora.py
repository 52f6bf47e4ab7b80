"""What adapters save between trainer and engine, and what they cost: bytes, seconds, gaps.

    python benchmarks/lora.py [--hidden 512] [--layers 8] [--vocab 8192] [--rank 16] [--rounds 5] [--quick]
                              [--output benchmarks/results/lora.json]

One decoder with random weights, built on the spot, once with all weights trained and once with adapters on all linear
layers. Four tables:

    sync        what an engine with weights of its own is sent after an update, and the seconds until it serves it:
                all tensors (full), all tensors with the adapters folded in (merged), the adapters alone (adapter),
                each as the file that such an engine maps; and the refresh of the engine in this process
    gap         |engine - trainer| of the log-probs of the tokens that were drawn after that sync, float32 and bfloat16
    reference   |policy without its adapters - the same model loaded apart|
    decode      tokens a second with the matrices folded, and with the adapters' two factors beside them

Gates before any timing: log-probs of the merged weights within 1e-4 of the policy's, and the two ways to decode within
1e-4 of one another. Cases take turns, medians of `--rounds`. The last line is `worst_ratio=<x> against full at <case>`:
the bytes of the adapter's sync go into full's so many times.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.build.engines import native_engine
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.keyed_random import derive_key
from rft_core.packed_tokens import PackedTokens
from rft_engine.weight_sync.weight_file import read_weight_file, write_weight_file
from rft_models.decode.fast_decoder import FastDecoder, _fuse, _rms_norm, decoder_for
from rft_models.layers.fast_linear import linear
from rft_models.lora.adapters import AdapterRules, BaseModelView
from rft_models.lora.merge import ADAPTER, base_layer
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy, load_reference
from rft_models.tiny_models.text import build_character_tokenizer, build_decoder

SEED = 0
GATE = 1e-4


def main() -> None:
    """Parse, measure, print, write."""
    given = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = _model(Path(folder), given)
        result = {
            "machine": {"processor": platform.processor() or platform.machine(), "threads": 1},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "case": {name: getattr(given, name) for name in ("hidden", "layers", "vocab", "rank", "rounds")},
            "sync": sync_table(directory, given, Path(folder)),
            "gap": gap_table(directory, given),
            "reference": reference_row(directory, given),
            "decode": decode_table(directory, given),
        }
    show(result)
    if given.output:
        Path(given.output).parent.mkdir(parents=True, exist_ok=True)
        Path(given.output).write_text(json.dumps(result, indent=1) + "\n")
    sync = {row["what"]: row for row in result["sync"]}
    ratio = sync["full"]["bytes"] / sync["adapter"]["bytes"]
    print(f"worst_ratio={ratio:.1f} against full at sync bytes, rank {given.rank}")


def sync_table(directory: Path, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bytes and seconds of each way, through a file as engines in processes of their own map it."""
    full, adapted = load_policy(directory), trained(directory, given)
    adapters = adapted.adapters
    assert adapters is not None
    ways: dict[str, Callable[[], Iterable[tuple[str, Tensor]]]] = {
        "full": full.merged_parameters,
        "merged": adapted.merged_parameters,
        "adapter": lambda: adapters.tensors(adapters.named_parameters()).items(),
    }
    file, seconds = folder / "sync.safetensors", {name: list[float]() for name in ways}
    bytes_of: dict[str, int] = {}
    for _ in range(given.rounds + 1):
        for name, provider in ways.items():
            started = time.perf_counter()
            write_weight_file(file, provider(), 4000)
            read = read_weight_file(file)
            total = sum(int(tensor.reshape(-1)[-1:].numel()) for tensor in read.values())
            seconds[name].append(time.perf_counter() - started)
            assert total == len(read)
            bytes_of[name] = sum(tensor.numel() * tensor.element_size() for tensor in read.values())
    rows = [{"what": name, "bytes": bytes_of[name], "seconds": _median(seconds[name])} for name in ways]
    for name, policy in (("full, refresh in process", full), ("merged, refresh in process", adapted)):
        decoder = decoder_for(policy)
        times = [_timed(decoder.refresh) for _ in range(given.rounds + 1)]
        rows.append({"what": name, "bytes": 0, "seconds": _median(times)})
    return rows


def gap_table(directory: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Of tokens drawn by the engine in this process, on the trained parameters and on a copy of them."""
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = trained(directory, given, dtype)
        for engine_dtype in (None, torch.bfloat16)[: 2 if dtype is torch.float32 else 1]:
            engine = native_engine(policy, 16, 64, "cpu", dtype=engine_dtype)
            engine.load_weights(1)
            prompts = [[2 + (7 * p + t) % 40 for t in range(8)] for p in range(4)]
            keys = [[derive_key(SEED, "gap", p, n) for n in range(4)] for p in range(4)]
            drawn = engine.generate(prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=32))
            gaps = [_gap(policy, prompts[p], each) for p, group in enumerate(drawn) for each in group]
            flat = torch.cat(gaps)
            kind = "shared" if engine_dtype in (None, dtype) else "copy"
            rows.append(
                {
                    "trainer": str(dtype).removeprefix("torch."),
                    "engine": f"{kind}, {str(engine_dtype or dtype).removeprefix('torch.')}",
                    "tokens": len(flat),
                    "mean": float(flat.mean()),
                    "largest": float(flat.max()),
                }
            )
    return rows


@torch.no_grad()
def reference_row(directory: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The policy without its adapters beside a second copy of the model."""
    policy, apart = trained(directory, given), load_reference(directory)
    batch = _batch(given.vocab)
    found, expected = (
        BaseModelView(policy).token_logprobs(PackedTokens(*batch))[0],
        apart.token_logprobs(PackedTokens(*batch))[0],
    )
    held = sum(parameter.numel() * parameter.element_size() for _, parameter in apart.named_parameters())
    return {"tokens": len(found), "largest": float((found - expected).abs().max()), "bytes_saved": held}


def decode_table(directory: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of 1, 8 and 32 rows, folded and with the factors beside the matrices."""
    policy = trained(directory, given)
    ways = {"folded": FastDecoder(policy), "factors": FactoredDecoder(policy)}
    rows: list[dict[str, Any]] = []
    steps = 8 if given.quick else 24
    for num_rows in (1, 8, 32):
        tokens = torch.arange(16)[None] % given.vocab
        seconds, logits = {name: list[float]() for name in ways}, dict[str, Tensor]()
        for _ in range(given.rounds + 1):
            for name, decoder in ways.items():
                cache = decoder.new_cache(num_rows, 16 + steps)
                decoder.prefill(cache, tokens, torch.tensor([16]), [num_rows])
                ids = torch.arange(num_rows) % given.vocab
                started = time.perf_counter()
                for _ in range(steps):
                    logits[name] = decoder.step(cache, ids)
                seconds[name].append(time.perf_counter() - started)
        apart = float((logits["folded"].log_softmax(-1) - logits["factors"].log_softmax(-1)).abs().max())
        assert apart <= GATE, f"the two ways to decode differ by {apart:.3g}"
        rates = {name: num_rows * steps / _median(times) for name, times in seconds.items()}
        rows.append({"rows": num_rows, **{f"{name}_tokens_per_second": rate for name, rate in rates.items()}})
    return rows


class FactoredDecoder(FastDecoder):
    """The fast decoder on the model's own matrices, with s B A x added beside each."""

    def refresh(self) -> None:
        """Fuse the model's own matrices."""
        self._layers = [_unfolded(layer) for layer in self._backbone.layers]
        self._forget_recordings()

    def _project(self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the fast decoder's for a model without norms of heads."""
        attention = layer.module.self_attn
        normed = _rms_norm(hidden, layer.module.input_layernorm)
        both = linear(normed, layer.qkv, layer.qkv_bias)
        both += _added(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        heads = both.view(hidden.shape[0], -1, self._head_dim)
        rotated, value = heads[:, : -self._num_kv_heads], heads[:, -self._num_kv_heads :]
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], value

    def _finish(self, layer: Any, hidden: Tensor, attended: Tensor) -> None:
        """As the fast decoder's."""
        module = layer.module
        output, down = module.self_attn.o_proj, module.mlp.down_proj
        hidden.add_(linear(attended, output.weight, output.bias)).add_(_added(attended, output))
        normed = _rms_norm(hidden, module.post_attention_layernorm)
        both = linear(normed, layer.gate_up, layer.gate_up_bias)
        both += _added(normed, module.mlp.gate_proj, module.mlp.up_proj)
        gate, up = both.chunk(2, -1)
        between = module.mlp.act_fn(gate).mul_(up)
        hidden.add_(linear(between, down.weight, down.bias)).add_(_added(between, down))


def _unfolded(module: Any) -> Any:
    """A layer's matrices laid one after another, without their adapters."""
    attention, mlp = module.self_attn, module.mlp
    qkv = [base_layer(part).weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    gate_up = [base_layer(part).weight for part in (mlp.gate_proj, mlp.up_proj)]
    return replace(
        _fuse(module), qkv=torch.cat(qkv).detach(), gate_up=torch.cat(gate_up).detach(), output=None, down=None
    )


def _added(inputs: Tensor, *modules: Any) -> Tensor:
    parts = [
        linear(linear(inputs, module.lora_A[ADAPTER].weight), module.lora_B[ADAPTER].weight) * module.scaling[ADAPTER]
        for module in modules
    ]
    return torch.cat(parts, -1)


def trained(directory: Path, given: argparse.Namespace, dtype: torch.dtype = torch.float32) -> CausalPolicy:
    """With adapters whose values are those of a run under way."""
    policy = load_policy(directory, dtype=dtype)
    adapters = add_adapters(policy, AdapterRules(rank=given.rank), seed=SEED)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapters.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return policy.eval()


@torch.no_grad()
def _gap(policy: CausalPolicy, prompt: list[int], completion: Any) -> Tensor:
    tokens = torch.tensor([*prompt, *completion.token_ids])
    places = torch.arange(len(tokens))
    found, _ = policy.token_logprobs(PackedTokens(tokens, places, torch.zeros_like(tokens), places >= len(prompt)))
    return (found[len(prompt) :] - torch.tensor(completion.logprobs)).abs()


def _batch(vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.randint(vocab, (256,), generator=torch.Generator().manual_seed(3))
    places = torch.arange(256) % 64
    return tokens, places, torch.arange(256) // 64, places > 0


def _model(folder: Path, given: argparse.Namespace) -> Path:
    tokenizer = build_character_tokenizer("".join(chr(0x4E00 + n) for n in range(given.vocab - 2)))
    return build_decoder(
        folder / "model",
        tokenizer,
        hidden=given.hidden,
        layers=given.layers,
        heads=8,
        kv_heads=4,
        ffn=3 * given.hidden,
        max_positions=256,
        seed=SEED,
    )


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _median(seconds: list[float]) -> float:
    """Without the first, which warms up."""
    return statistics.median(seconds[1:])


def show(result: dict[str, Any]) -> None:
    """The tables."""
    print(f"{'sync':<30} {'MB':>10} {'ms':>10}")
    for row in result["sync"]:
        print(f"{row['what']:<30} {row['bytes'] / 1e6:>10.2f} {1e3 * row['seconds']:>10.1f}")
    print(f"\n{'gap after sync, nats':<30} {'tokens':>10} {'mean':>10} {'largest':>10}")
    for row in result["gap"]:
        what = f"{row['trainer']} trainer, {row['engine']}"
        print(f"{what:<30} {row['tokens']:>10} {row['mean']:>10.2g} {row['largest']:>10.2g}")
    row = result["reference"]
    saved = row["bytes_saved"] / 1e6
    print(f"\nreference: largest difference {row['largest']:.2g} over {row['tokens']} tokens, {saved:.1f} MB not held")
    print(f"\n{'decode, tokens a second':<30} {'folded':>10} {'factors':>10}")
    for row in result["decode"]:
        folded, factors = row["folded_tokens_per_second"], row["factors_tokens_per_second"]
        print(f"{row['rows']:<30} {folded:>10.0f} {factors:>10.0f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 8), ("vocab", 8192), ("rank", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="a model of a quarter the width, three rounds")
    parser.add_argument("--output", default="")
    given = parser.parse_args()
    if given.quick:
        given.hidden, given.layers, given.vocab, given.rounds = given.hidden // 4, 4, given.vocab // 8, 3
    return given


if __name__ == "__main__":
    main()
