"""A double of SGLang 0.5.21 that keeps its protocol: seeds, stops, cache, update sessions, memory, worker calls.

Every call is bound against the signature in `pinned_api.json` first, so one that the release would not
understand fails here too. The model is that of `fake_vllm`: a few tensors, every one of which moves the
logits, with q, k and v fused and the output matrix held a second time. `faults` plants what goes wrong in the field.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fake_vllm import HIDDEN, PADDING, VOCAB, fake_logits
from torch import Tensor

from rft_core import keyed_random
from rft_engine.sglang.pinned_api import signature, unknown_fields
from rft_engine.sglang.settings import end_tokens
from rft_engine.weight_sync.weight_file import read_weight_file

_EMBEDDING, _NORM = "model.embed_tokens.weight", "model.norm.weight"
_ATTENTION = "model.layers.0.self_attn."
_PARTS = ("q_proj", "k_proj", "v_proj")


def _as_released(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Bind each call against the release's signature; what the double does not model must be left out."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(signature(name).bind(self, *args, **kwargs).arguments)
            given.pop("self")
            return method(self, **given.pop("kwargs", {}), **given)

        vars(call)["released_as"] = name
        return call

    return wrap


class FakeModel:
    """Parameters as SGLang lays them out: a padded vocabulary, q, k and v in one matrix, a copied head."""

    def __init__(self, tensors: Mapping[str, Tensor], faults: set[str], rank: int) -> None:
        self.embedding = torch.zeros(VOCAB + PADDING, HIDDEN)
        self.head = torch.zeros(VOCAB + PADDING, HIDDEN)
        self.fused = torch.zeros(3 * HIDDEN, HIDDEN)
        self.norm = torch.zeros(HIDDEN)
        self._faults, self._rank = set[str](), rank
        self.load_weights(tensors.items())
        self._faults = faults

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield _EMBEDDING, self.embedding
        yield f"{_ATTENTION}qkv_proj.weight", self.fused
        yield _NORM, self.norm
        yield "lm_head.weight", self.head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy by checkpoint name, and the head from the embedding."""
        given = list(weights)
        if "load_error" in self._faults:
            raise RuntimeError("a tensor has another shape")
        if "skip" in self._faults or ("replica" in self._faults and self._rank == 1):
            return
        if "half" in self._faults:
            given = given[: len(given) // 2]
        for name, tensor in given:
            self.view(name).copy_(tensor)
        if "tied" not in self._faults:
            self.head.copy_(self.embedding)

    def view(self, name: str) -> Tensor:
        if name == _EMBEDDING:
            return self.embedding[:VOCAB]
        if name == _NORM:
            return self.norm
        first = HIDDEN * next(number for number, part in enumerate(_PARTS) if part in name)
        return self.fused[first : first + HIDDEN]

    def values(self) -> dict[str, Tensor]:
        """Copies by checkpoint name."""
        names = [_EMBEDDING, _NORM, *(f"{_ATTENTION}{part}.weight" for part in _PARTS)]
        return {name: self.view(name).clone() for name in names}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return fake_logits(self.values(), tokens, self.head[:VOCAB])


class FakeRequests:
    """`tokenizer_manager`."""

    def __init__(self) -> None:
        self.num_aborts = 0

    @_as_released("TokenizerManager.abort_request")
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert abort_all
        self.num_aborts += 1


class FakeEngine:
    """`sglang.Engine`."""

    @_as_released("Engine.__init__")
    def __init__(self, **arguments: Any) -> None:
        self.faults: set[str] = arguments.pop("faults")
        self._die_after: int | None = arguments.pop("die_after")
        unknown = unknown_fields("ServerArgs", arguments)
        assert not unknown, f"ServerArgs has no {unknown}"
        self.arguments = arguments
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = FakeRequests()
        [file] = Path(arguments["model_path"]).glob("*.safetensors")
        tensors = read_weight_file(file)
        self.models = [FakeModel(tensors, self.faults, rank) for rank in range(arguments["tp_size"])]
        self.calls: list[str] = []
        self._old: list[dict[str, Tensor]] = []
        self.prefixes: dict[tuple[int, ...], Tensor] = {}
        self.released: set[str] = set()
        self._in_session, self._num_running, self._num_finished, self.num_sessions = False, 0, 0, 0
        self._ends = end_tokens(arguments["model_path"])

    @_as_released("Engine.async_generate")
    def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], return_logprob: bool, top_logprobs_num: int
    ) -> Any:
        assert top_logprobs_num <= VOCAB, "torch.topk raises in the scheduler"
        unknown = unknown_fields("SamplingParams", sampling_params)
        assert not unknown, f"SamplingParams has no {unknown}"
        assert return_logprob
        return self._generate(input_ids, sampling_params, top_logprobs_num)

    @_as_released("Engine.begin_weight_update")
    def begin_weight_update(self) -> tuple[bool, str]:
        if self._in_session:
            return False, "a session is open"
        self._in_session, self.num_sessions = True, self.num_sessions + 1
        return True, "Success"

    @_as_released("Engine.update_weights_from_tensor")
    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Call the custom loader in every worker, as far as it was declared at the start."""
        if not self._in_session:
            return False, "no session is open"
        assert load_format in self.arguments["custom_weight_loader"], f"unknown load_format {load_format}"
        if "weights" in self.released:
            raise RuntimeError("weights are loaded into memory that was given back")
        self._old = [model.values() for model in self.models] if flush_cache else self._old
        module, _, function = load_format.rpartition(".")
        for model in self.models:
            getattr(importlib.import_module(module), function)(model, list(named_tensors))
        if "overwritten" in self.faults:
            self._restore()
        if flush_cache:
            self._flush()
        self.calls.append(f"update flush={flush_cache}")
        return True, "Success"

    @_as_released("Engine.end_weight_update")
    def end_weight_update(self) -> tuple[bool, str]:
        was_open, self._in_session = self._in_session, False
        return was_open, "Success" if was_open else "no session is open"

    @_as_released("Engine.flush_cache")
    def flush_cache(self) -> Any:
        self.calls.append("flush")
        if "overwritten_later" in self.faults:
            self._restore()
        self._flush()
        return SimpleNamespace(success=not self._num_running and "refuses_flush" not in self.faults, message="")

    @_as_released("Engine.release_memory_occupation")
    def release_memory_occupation(self, tags: list[str]) -> None:
        assert not self._num_running, "it is called only when the server is idle"
        assert self.arguments["enable_memory_saver"], "nothing would be given back"
        self.calls.append(f"release {tags}")
        self.released |= set(tags)
        self._flush()

    @_as_released("Engine.resume_memory_occupation")
    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(f"resume {tags}")
        for tag in tags:
            self.released.remove(tag)  # KeyError, as there, where it was not released

    @_as_released("Engine.shutdown")
    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.loop.close()

    def _restore(self) -> None:
        for model, values in zip(self.models, self._old, strict=True):
            model.load_weights(values.items())

    def _flush(self) -> None:
        if "keeps_prefix" not in self.faults:
            self.prefixes.clear()

    async def _generate(self, prompt: list[int], params: dict[str, Any], num_shown: int) -> dict[str, Any]:
        if self.released:
            raise RuntimeError(f"a step while {self.released} are released")
        self._num_running += 1
        output, scores, tops = list[int](), list[Any](), list[Any]()
        num_cached = len(prompt) - 1 if tuple(prompt) in self.prefixes else 0
        room = self.arguments["context_length"] - 2 - len(prompt)
        reason: dict[str, Any] = {}
        while not reason:
            await self._step()
            if self.tokenizer_manager.num_aborts:
                reason = {"type": "abort"}
                break
            token, logprobs_V = self._draw([*prompt, *output], params, is_first=not output)
            output.append(token)
            scores.append((float(logprobs_V[token]), token, None))
            shown = logprobs_V.sort(descending=True)
            tops.append([(float(shown.values[i]), int(shown.indices[i]), None) for i in range(num_shown)])
            stops = set(params["stop_token_ids"]) | self._ends
            if token in stops and not params["ignore_eos"]:
                reason = {"type": "stop", "matched": token}
            elif len(output) >= min(params["max_new_tokens"], room):
                reason = {"type": "length", "length": params["max_new_tokens"]}
        self._num_running -= 1
        self._note_finished()
        if "garbage" in self.faults:
            output[-1] = (output[-1] + 1) % VOCAB
        meta = {"finish_reason": reason, "prompt_tokens": len(prompt), "cached_tokens": num_cached}
        shown_meta = {"output_top_logprobs": tops} if num_shown else {}
        return {"output_ids": output, "meta_info": {**meta, "output_token_logprobs": scores, **shown_meta}}

    async def _step(self) -> None:
        """One step of the batch; "hang" ends with an abortion, "stuck" never."""
        await asyncio.sleep(0.0)
        while "stuck" in self.faults or ("hang" in self.faults and not self.tokenizer_manager.num_aborts):
            await asyncio.sleep(0.01)

    def _draw(self, tokens: list[int], params: dict[str, Any], *, is_first: bool) -> tuple[int, Tensor]:
        """(token, [V] log-probs that are returned): noise is a function of seed, position and token id."""
        logits_V = self._prompt_logits(tokens) if is_first else self.models[0].logits(tokens)
        if params["temperature"] == 0.0:
            logprobs_V = logits_V.log_softmax(-1)
            return int(logprobs_V.argmax()), logprobs_V
        logprobs_V = (logits_V / params["temperature"]).log_softmax(-1)
        weights_V = logprobs_V.exp()
        sorted_V, order_V = weights_V.sort(descending=True)
        sorted_V = sorted_V.clone()
        cut_V = sorted_V.cumsum(-1) - sorted_V > params.get("top_p", 1.0)
        cut_V |= torch.arange(VOCAB) >= params.get("top_k", 1 << 30)
        kept_V = torch.zeros_like(weights_V).scatter(0, order_V, sorted_V.masked_fill(cut_V, 0.0))
        seed, position = params["sampling_seed"], len(tokens) - 1
        uniforms_V = keyed_random.uniforms([seed], VOCAB, start=position * VOCAB)[0].clamp(1e-12, 1 - 1e-12)
        return int((kept_V.double().log() - (-uniforms_V.log()).log()).argmax()), logprobs_V

    def _prompt_logits(self, prompt: list[int]) -> Tensor:
        """From the prefix cache, where an earlier request left them."""
        known = self.prefixes.get(tuple(prompt))
        if known is None:
            known = self.prefixes[tuple(prompt)] = self.models[0].logits(prompt)
        return known

    def _note_finished(self) -> None:
        self._num_finished += 1
        if self._die_after is not None and self._num_finished > self._die_after:
            os.abort()


class FakeSglang:
    """The runtime: what `InstalledSglang` is for the real one."""

    def __init__(self, *, faults: Iterable[str] = (), die_after: int | None = None, start_error: str = "") -> None:
        """
        Args:
            faults: "skip", "half", "tied", "overwritten", "overwritten_later", "replica", "keeps_prefix",
                "refuses_flush", "load_error", "garbage", "hang", "stuck"; may be changed later.
            die_after: end the process in the middle of a call, after this many samples.
            start_error: what SGLang says when it does not start.
        """
        self.faults, self._die_after, self._start_error = set(faults), die_after, start_error
        self.engine: FakeEngine | None = None

    def make_engine(self, arguments: dict[str, Any]) -> FakeEngine:
        assert threading.current_thread() is threading.main_thread(), "SGLang sets signal handlers"
        if self._start_error:
            raise RuntimeError(self._start_error)
        self.engine = FakeEngine(**arguments, faults=self.faults, die_after=self._die_after)
        return self.engine
