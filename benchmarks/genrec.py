"""Constrained beam decoding beside transformers' `generate`, and log-probs within a constraint, at V = 152,000.

    python benchmarks/genrec.py [--sizes 1M 100M] [--beams 50] [--rounds 3] [--threads 1]

See README.md for what is compared. The last line is `worst_ratio=<x> against <peer> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from rft_algos.decoding.token_trie import TokenTrie
from rft_core.packed_tokens import AllowedTokens
from rft_engine.decoding.constrained_logits import ConstrainedLogitsProcessor
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.logprobs.allowed_logprobs import allowed_logprobs
from rft_models.logprobs.linear_logprobs import linear_logprobs
from rft_models.policy.load import make_policy

RESULTS = Path(__file__).resolve().parent / "results" / "genrec.json"
VOCABULARY, EOS, NEWLINE = 152_000, 1, 198
FIRST_CODE, CODES, ITEMS = 151_000, 256, 3_686
HEADER = (14_374, 5_949, 510)
"""Tokens of the response header, at the end of every prompt."""
SHAPES: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
    "100M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8},
}
PROMPTS = {"1M": 4, "100M": 1}
"""Few, so that a round takes seconds of a core; a batch of the evaluation of MiniOneRec has 8."""
OURS = "rft native beam search"

Beams = list[list[tuple[tuple[int, ...], float]]]
"""For each prompt its sequences with their scores, best first."""


def catalogue() -> list[list[int]]:
    """Distinct IDs of three levels, a line end and the end token: five tokens, as MiniOneRec writes them."""
    numbers, found = random.Random(3), set[tuple[int, ...]]()
    while len(found) < ITEMS:
        found.add(tuple(FIRST_CODE + CODES * level + numbers.randrange(CODES) for level in range(3)))
    return [[*codes, NEWLINE, EOS] for codes in sorted(found)]


def prompts_of(number: int) -> list[list[int]]:
    """Prompts of 30 to 48 tokens that end with the header."""
    numbers = random.Random(7)
    return [
        [*(numbers.randrange(2, 150_000) for _ in range(27 + 18 * i // max(1, number - 1))), *HEADER]
        for i in range(number)
    ]


def model_of(size: str) -> Any:
    """A decoder from scratch, tied, peaked enough that beams differ between prompts."""
    torch.manual_seed(1)
    shape = SHAPES[size]
    more = {"num_key_value_heads": shape["num_attention_heads"], "max_position_embeddings": 128}
    config = AutoConfig.for_model(
        "qwen2", vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=0, tie_word_embeddings=True, **shape, **more
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
    return model


class Forward:
    """Seconds spent inside the model's forward passes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is counted."""

        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return call


@dataclass(frozen=True)
class Timed:
    """One search: its beams, and seconds in all and in the model."""

    beams: Beams
    seconds: float
    forward: float


class DictionaryProcessor:
    """A prefix dictionary in the manner of MiniOneRec, written from its description (not its code).

    Keys are ids joined by "-": the header's at the first call, those generated so far later. It counts its calls,
    normalises the scores again, and adds -1e6 to all that no key allows.
    """

    def __init__(self, sequences: list[list[int]], num_beams: int) -> None:
        self._allowed: dict[str, set[int]] = {}
        for sequence in sequences:
            for place, token in enumerate(sequence):
                key = sequence[:place] if place else list(HEADER)
                self._allowed.setdefault("-".join(map(str, key)), set()).add(token)
        self._num_beams, self._count = num_beams, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.log_softmax(-1)
        mask = torch.full_like(scores, -1_000_000.0)
        num_last = self._count or len(HEADER)
        for prompt, beams in enumerate(input_ids.view(-1, self._num_beams, input_ids.shape[-1])):
            for beam, tokens in enumerate(beams):
                key = "-".join(map(str, tokens[-num_last:].tolist()))
                allowed = self._allowed.get(key)
                if allowed:
                    mask[prompt * self._num_beams + beam, list(allowed)] = 0.0
        self._count += 1
        return scores + mask


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts padded on the left, with their mask."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


class Sides:
    """Our search and transformers' with three kinds of constraint, on one model."""

    def __init__(self, size: str, num_beams: int) -> None:
        self.sequences, self.prompts, self.num_beams = catalogue(), prompts_of(PROMPTS[size]), num_beams
        self.trie, self.model, self.forward = TokenTrie.of(self.sequences), model_of(size), Forward()
        decoder: Any = decoder_for(make_policy(self.model, None, packed=True))
        for name in ("prefill", "step"):
            setattr(decoder, name, self.forward.timed(getattr(decoder, name)))
        self._engine = NativeEngine(decoder, max_rows=num_beams * len(self.prompts), max_len=64)
        self._plain = self.model.forward
        self._prefixes: dict[tuple[int, ...], list[int]] = {}
        for sequence in self.sequences:
            for place, token in enumerate(sequence):
                following = self._prefixes.setdefault(tuple(sequence[:place]), [])
                if not following or following[-1] != token:
                    following.append(token)
        self.names: dict[str, Callable[[], Beams]] = {
            OURS: self._ours,
            "transformers, prefix_allowed_tokens_fn": self._with_function,
            "transformers, prefix dictionary": self._with_dictionary,
            "transformers, our processor": self._with_processor,
        }

    def run(self, name: str) -> Timed:
        """One search of a side."""
        self.forward.seconds = 0.0
        started = time.perf_counter()
        with self._timed_model(), torch.inference_mode():
            beams = self.names[name]()
        return Timed(beams, time.perf_counter() - started, self.forward.seconds)

    @contextmanager
    def _timed_model(self) -> Any:
        self.model.forward = self.forward.timed(self._plain)
        yield
        self.model.forward = self._plain

    def _ours(self) -> Beams:
        found = self._engine.beam_search(self.prompts, self.trie, num_beams=self.num_beams)
        return [[(beam.token_ids, sum(beam.logprobs)) for beam in beams] for beams in found]

    def _generated(self, **constraint: Any) -> Beams:
        inputs = padded(self.prompts)
        found = self.model.generate(
            **inputs,
            do_sample=False,
            num_beams=self.num_beams,
            num_return_sequences=self.num_beams,
            length_penalty=0.0,
            max_new_tokens=self.trie.depth,
            output_scores=True,
            return_dict_in_generate=True,
            **constraint,
        )
        tokens = found.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        pairs = list(zip(map(tuple, tokens), found.sequences_scores.tolist(), strict=True))
        return [pairs[start : start + self.num_beams] for start in range(0, len(pairs), self.num_beams)]

    def _with_function(self) -> Beams:
        length = max(map(len, self.prompts))
        prefixes = self._prefixes
        return self._generated(
            prefix_allowed_tokens_fn=lambda _, tokens: prefixes.get(tuple(tokens[length:].tolist()), [EOS])
        )

    def _with_dictionary(self) -> Beams:
        return self._generated(logits_processor=[DictionaryProcessor(self.sequences, self.num_beams)])

    def _with_processor(self) -> Beams:
        processor = ConstrainedLogitsProcessor(self.trie, padded(self.prompts)["input_ids"], eos_token_id=EOS)
        return self._generated(logits_processor=[processor])


def require_equal(name: str, found: Beams, wanted: Beams) -> float:
    """The largest difference of scores; raises unless the beams are the same but for the order of near equals."""
    worst = 0.0
    for ours, theirs in zip(wanted, found, strict=True):
        scores = dict(theirs)
        last = ours[-1][1]
        for sequence, score in ours:
            if sequence in scores:
                worst = max(worst, abs(scores[sequence] - score))
            elif score > last + 1e-3:  # at the edge of the beam rounding may choose another sequence
                raise SystemExit(f"{name} lacks {sequence} of score {score}")
    if worst > 1e-3:
        raise SystemExit(f"{name}: scores differ by {worst}")
    return worst


def decoding_case(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Gate, then all sides in turn."""
    sides = Sides(size, arguments.beams)
    first = {name: sides.run(name) for name in sides.names}
    gaps = {name: require_equal(name, one.beams, first[OURS].beams) for name, one in first.items()}
    rounds: dict[str, list[Timed]] = {name: [] for name in sides.names}
    for turn in range(arguments.rounds):
        for name in list(sides.names)[:: 1 if turn % 2 else -1]:
            rounds[name].append(sides.run(name))
    rows: dict[str, dict[str, float]] = {}
    for name, times in rounds.items():
        middle = sorted(times, key=lambda one: one.seconds)[len(times) // 2]
        outside = statistics.median(one.seconds - one.forward for one in times)
        rows[name] = {"seconds": middle.seconds, "forward": middle.forward, "outside": outside, "gap": gaps[name]}
    ratios = {
        name: {field: row[field] / rows[OURS][field] for field in ("seconds", "outside")}
        for name, row in rows.items()
        if name != OURS
    }
    parameters = sum(parameter.numel() for parameter in sides.model.parameters())
    case = f"{size}, {PROMPTS[size]} prompts, {arguments.beams} beams"
    return {"case": case, "parameters": parameters, "sides": rows, "ratios": ratios}


class Head(nn.Module):
    """Hidden states and an output matrix."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(rows, width))
        self.weight = nn.Parameter(torch.randn(VOCABULARY, width) / width**0.5)


def logprob_case(rounds: int, *, rows: int = 1000, width: int = 256) -> dict[str, Any]:
    """Forward and backward of a step's log-probs: within the constraint, over the vocabulary, and masked."""
    torch.manual_seed(0)
    trie, sequences = TokenTrie.of(catalogue()), catalogue()
    numbers = random.Random(5)
    chosen = [sequences[numbers.randrange(ITEMS)] for _ in range(rows // trie.depth)]
    sets: list[list[int]] = []
    for sequence in chosen:
        state = torch.zeros(1, dtype=torch.int64)
        for token in sequence:
            tokens, _, there = trie.allowed(state)
            sets.append(tokens[0][there[0]].tolist())
            state = trie.advance(state, torch.tensor([token]))
    targets = torch.tensor([token for sequence in chosen for token in sequence])
    allowed = AllowedTokens(torch.tensor([t for s in sets for t in s]), torch.tensor([len(s) for s in sets]))
    head = Head(rows, width)

    def masked() -> Tensor:
        mask = torch.full((rows, VOCABULARY), -torch.inf)
        mask[torch.repeat_interleave(torch.arange(rows), allowed.counts_R), allowed.ids_E] = 0.0
        logprobs = (head.hidden @ head.weight.T + mask).log_softmax(-1)
        return logprobs.gather(1, targets[:, None])[:, 0]

    sides: dict[str, Callable[[], Tensor]] = {
        "within the constraint, gathered": lambda: allowed_logprobs(head.hidden, head.weight, targets, allowed)[0],
        "within the constraint, masked softmax": masked,
        "over the vocabulary, rft": lambda: linear_logprobs(head.hidden, head.weight, targets)[0],
    }
    values: dict[str, list[Tensor]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            head.zero_grad()
            started = time.perf_counter()
            logprobs = side()
            logprobs.sum().backward()
            if turn:
                seconds[name].append(time.perf_counter() - started)
            else:
                values[name] = [logprobs.detach(), *(p.grad for p in head.parameters() if p.grad is not None)]
    ours, reference = (values[name] for name in list(sides)[:2])
    gap = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(ours, reference, strict=True))
    if gap > 1e-5:
        raise SystemExit(f"log-probs within the constraint differ from the masked softmax by {gap}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians.values()))
    shape = f"{rows} tokens, width {width}, vocabulary {VOCABULARY}"
    return {"case": shape, "gap": gap, "seconds": medians, "ratios": {n: s / first for n, s in medians.items()}}


def show(case: dict[str, Any]) -> None:
    """One line a side."""
    print(f"{case['case']} ({case['parameters'] / 1e6:.1f} M parameters)")
    for name, row in case["sides"].items():
        ratio = case["ratios"].get(name)
        beside = f"  ours: {ratio['outside']:.1f} x outside, {ratio['seconds']:.2f} x in all" if ratio else ""
        print(
            f"    {name:<42}{row['seconds']:>8.3f} s, of it {row['outside']:.3f} s outside of the forward pass; "
            f"largest difference of a score {row['gap']:.1e}{beside}"
        )
    sys.stdout.flush()


def main() -> None:
    """Cases one after the other, the file, and the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--beams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one of warm-up, which is the gate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = []
    for size in arguments.sizes:
        cases.append(decoding_case(size, arguments))
        show(cases[-1])
    logprobs = logprob_case(arguments.rounds)
    print(f"log-probs forward and backward, {logprobs['case']}, largest relative difference {logprobs['gap']:.1e}")
    for name, seconds in logprobs["seconds"].items():
        print(f"    {name:<42}{seconds:>8.3f} s  {logprobs['ratios'][name]:.2f}")
    output = arguments.output or (RESULTS if set(arguments.sizes) == set(SHAPES) else None)
    if output is not None:
        setting = {"threads": arguments.threads, "rounds": arguments.rounds, "load": os.getloadavg()[0]}
        setting |= {"torch": torch.__version__, "transformers": transformers_version}
        found = {"setting": setting, "decoding": cases, "logprobs": logprobs}
        output.write_text(json.dumps(found, indent=1) + "\n")
    peers = ("transformers, prefix_allowed_tokens_fn", "transformers, prefix dictionary")
    ratios = [(case["ratios"][name]["seconds"], name, case["case"]) for case in cases for name in peers]
    ratio, peer, place = min(ratios)
    print(f"worst_ratio={ratio:.2f} against {peer} at {place}")


if __name__ == "__main__":
    main()
