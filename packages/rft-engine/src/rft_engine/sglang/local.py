"""One SGLang in this process: requests, weights and sleep, for its worker process."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.process.gpu_processes import Inventory, nvidia_inventory
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts, garbage
from rft_engine.sglang.runtime import SglangRoot, SglangRuntime
from rft_engine.sglang.settings import LOADER, START_REMEDY, SglangSettings, engine_arguments
from rft_engine.weight_sync.fingerprints import Fingerprint
from rft_engine.weight_sync.weight_errors import require_version
from rft_engine.weight_sync.weight_file import read_header, shared_directory

_AWAKE_ORDER = ("weights", "kv_cache")


class LocalSglang:
    """A started SGLang and the version of the weights it serves."""

    def __init__(
        self, settings: SglangSettings, runtime: SglangRuntime, inventory: Inventory = nvidia_inventory
    ) -> None:
        """Start SGLang in this process.

        Raises:
            OptionsError: a setting that SGLang cannot carry out.
            ServiceError: SGLang did not start; its own message.
        """
        self._settings = settings
        arguments = engine_arguments(settings)
        try:
            self._engine: SglangRoot = runtime.make_engine(arguments)
        except (RuntimeError, ValueError, OSError, MemoryError, AssertionError) as error:
            raise settings.not_started(error, START_REMEDY, inventory) from error
        self._is_closed, self.version = False, 0
        self._fingerprints: list[Fingerprint] = []
        vocab_size = int(settings.config()["vocab_size"])
        self.facts = EngineFacts(dtype=settings.resolved_dtype(), vocab_size=vocab_size, is_cpu=False, transport="file")

    @property
    def is_alive(self) -> bool:
        """True until it is closed: an engine in this process lives as long as the process."""
        return not self._is_closed

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        """Yield results as samples finish, then the counts; requests that are left when it ends early are dropped.

        SGLang does not report its steps: they are 0 in the counts.

        Raises:
            ServiceError: the call is for other weights, took longer than `seconds`, or SGLang's answer
                contradicts itself.
        """
        require_version(call.version, self.version)
        options = SamplingOptions.from_fields(call.options)
        finished: deque[asyncio.Task[dict[str, Any]]] = deque()
        some_finished = asyncio.Event()

        def note(task: asyncio.Task[dict[str, Any]]) -> None:
            # SGLang's loop runs inside `_wait` alone, so this and the loop below never run at the same time: no lock
            finished.append(task)
            some_finished.set()

        pending = self._submit(call, options)
        # before the loop runs for the first time: no end can be missed
        for task in pending:
            task.add_done_callback(note)
        deadline, num_total, num_prefill = time.monotonic() + seconds, len(pending), 0
        try:
            while pending:
                if not self._wait(some_finished, deadline):
                    raise self._settings.too_slow(num_total - len(pending), num_total, seconds)
                while finished:
                    task = finished.popleft()
                    sample = pending.pop(task)
                    answer = task.result()
                    num_prefill += answer["meta_info"]["prompt_tokens"] - answer["meta_info"]["cached_tokens"]
                    yield sample_of(sample, answer, options, self.version)
            yield StepCounts(0, num_prefill)
        finally:
            if pending:
                self._drop(pending)

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Fingerprint]:
        """Return fingerprints: `rft_load_file(path)` as each worker read them, `rft_fingerprints(shapes)` as held.

        Both happen in one of SGLang's update sessions, because the end of a session may rearrange experts
        (so a session that only reads would spoil them). The probe finds what changes afterwards.

        Raises:
            ServiceError: SGLang or a worker refused.
        """
        if method == "rft_load_file":
            return self._load(str(arguments[0]))
        assert method == "rft_fingerprints", f"SGLang's workers have no {method}"
        return self._fingerprints

    def serve(self, version: int) -> None:
        """Serve the weights loaded last as `version`; keys and values of older weights are dropped."""
        if not self._engine.flush_cache().success:
            raise ServiceError(
                code="engine.sglang.prefix_cache",
                what="SGLang did not drop its prefix cache when asked to",
                where=f"load_weights({version})",
                why="keys and values of older weights would be served with the new ones",
                state="the engine refuses to generate until a load succeeds",
                do=f"load_weights({version}) when no request is under way",
            )
        self.version = version

    def sleep(self, level: int) -> None:
        """Give the memory of cache and weights back; SGLang keeps a copy of the weights on the host at both levels."""
        self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, tags: list[str]) -> None:
        """Take memory again for "weights", "kv_cache" or both, weights first."""
        self._engine.resume_memory_occupation(tags=[tag for tag in _AWAKE_ORDER if tag in tags])

    def close(self) -> None:
        """End SGLang for good. Does nothing when closed."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.shutdown()

    def _submit(self, call: GenerateCall, options: SamplingOptions) -> dict[asyncio.Task[dict[str, Any]], int]:
        """Submit every request; return its task -> sample."""
        num_shown = min(options.top_k, self.facts.vocab_size) if options.temperature > 0.0 and options.top_k > 0 else 0
        pending: dict[asyncio.Task[dict[str, Any]], int] = {}
        for sample, prompt in call.requests:
            request = self._engine.async_generate(
                input_ids=list(call.prompts[prompt]),
                sampling_params=sampling_params(options, call.keys[sample], call.budget(sample)),
                return_logprob=True,
                top_logprobs_num=num_shown,
            )
            # only queued here: it starts when the loop next runs
            pending[self._engine.loop.create_task(request)] = sample
        return pending

    def _wait(self, some_finished: asyncio.Event, deadline: float) -> bool:
        """Let SGLang's loop run until a request has finished; False at the deadline."""

        async def wait() -> bool:
            try:
                await asyncio.wait_for(some_finished.wait(), max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                return False
            # the caller takes all that have finished before it waits again, so no end is lost with the flag
            some_finished.clear()
            return True

        return self._engine.loop.run_until_complete(wait())

    def _drop(self, pending: dict[asyncio.Task[dict[str, Any]], int]) -> None:
        """Abort the requests that are under way."""
        self._engine.tokenizer_manager.abort_request(abort_all=True)
        self._engine.loop.run_until_complete(asyncio.wait(list(pending)))  # the owner's deadline ends a longer wait
        for task in pending:
            task.exception()  # looked at, so that nothing is printed about it

    def _load(self, path: str) -> list[Fingerprint]:
        """Load a file in every worker, record the fingerprint each holds then, and return the one each read."""
        shapes = {name: entry["shape"] for name, entry in read_header(path).items()}
        _require("begin_weight_update", self._engine.begin_weight_update())
        try:
            loaded = self._exchange({"weights": path, "shapes": {}}, changes=True)
            # in the same update, after the load: what the workers hold, beside what they read
            looked = self._exchange({"weights": None, "shapes": shapes}, changes=False)
        finally:
            # also after an error: the session must not stay open
            ended = self._engine.end_weight_update()
        _require("end_weight_update", ended)
        # only now, when the update has ended well; `rft_fingerprints` hands them out
        self._fingerprints = [answer["held"] for answer in looked]
        return [answer["read"] for answer in loaded]

    def _exchange(self, request: dict[str, Any], *, changes: bool) -> list[dict[str, Any]]:
        """Return the answer of each worker to `sglang.weight_loader.exchange`."""
        with tempfile.TemporaryDirectory(prefix="rft-sglang-", dir=shared_directory(0)) as folder:
            request_path, answers = Path(folder) / "request.json", Path(folder) / "answer"
            request_path.write_text(json.dumps({**request, "dtype": self.facts.dtype, "answer": str(answers)}))
            carrier = [(str(request_path), torch.empty(0))]
            outcome = self._engine.update_weights_from_tensor(carrier, load_format=LOADER, flush_cache=changes)
            _require("update_weights_from_tensor", outcome)
            worker_answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("answer.*"))]
        wrong = next((answer["error"] for answer in worker_answers if "error" in answer), None)
        # SGLang reports success for all; a worker without an answer may still have the old weights
        if wrong is None and len(worker_answers) != self._settings.tensor_parallel_size:
            wrong = f"{len(worker_answers)} of {self._settings.tensor_parallel_size} workers answered"
        _require("custom_weight_loader", (wrong is None, wrong or ""))
        return worker_answers


def sampling_params(options: SamplingOptions, key: int, budget: int) -> dict[str, Any]:
    """SGLang's `SamplingParams` of one sample; the key is its seed."""
    params: dict[str, Any] = {
        "temperature": options.temperature,
        "max_new_tokens": budget,
        "stop_token_ids": list(options.stop_token_ids),
        "ignore_eos": not options.stop_token_ids,
        "sampling_seed": key,
    }
    if options.temperature > 0.0 and options.top_k > 0:
        params |= {"top_k": options.top_k, "top_p": options.top_p}
    return params


def sample_of(sample: int, answer: dict[str, Any], options: SamplingOptions, version: int) -> SampleResult:
    """One finished sample from what SGLang returned.

    Raises:
        ServiceError: the tokens are not those whose log-probs came with them.
    """
    meta = answer["meta_info"]
    tokens = list(answer["output_ids"])
    scored = meta["output_token_logprobs"]
    if [row[1] for row in scored] != tokens:
        raise garbage(f"sample {sample} of SGLang's answer has {len(tokens)} tokens and the log-probs of others")
    logprobs = [float(row[0]) for row in scored]
    masses = [0.0] * len(tokens)
    if options.temperature > 0.0 and options.top_k > 0:
        tops = meta["output_top_logprobs"]
        masses = [log_kept_mass(top, token, options.top_p) for top, token in zip(tops, tokens, strict=True)]
    ended: dict[str, Any] = meta["finish_reason"] or {"type": "nothing"}
    reason = str(ended["type"])
    return SampleResult(sample, tokens, logprobs, masses, reason, version)


def log_kept_mass(top: Sequence[Sequence[Any]], token: int, top_p: float) -> float:
    """Log of the probability that top-k and top-p left to draw from.

    Args:
        top: (log-prob, token, text) of the `top_k` likeliest tokens, likeliest first.
        token: the drawn one. SGLang adds in another precision, so where the sum comes to top-p within
            rounding it may have kept one token more: up to the drawn one, at least.
        top_p: a token is kept while those before it hold at most this much together.
    """
    mass = 0.0
    drawn_rank = next((i for i, row in enumerate(top) if row[1] == token), 0)
    for number, (logprob, _, _) in enumerate(top):
        if mass > top_p and number > drawn_rank:
            break
        mass += math.exp(logprob)
    return min(math.log(mass), 0.0)


def _require(operation: str, outcome: tuple[bool, str]) -> None:
    """Raise `ServiceError` unless SGLang's (success, message) reports success."""
    if outcome[0]:
        return
    raise ServiceError(
        code="engine.sglang.update",
        what=f"SGLang's {operation} failed: {outcome[1]}",
        where="transfer of weights to SGLang's workers",
        why="every worker must hold all of the new weights",
        state="the engine refuses to generate until a load succeeds",
        do="load_weights again; see SGLang's message and the end of its log",
    )
