"""One vLLM in this process: requests, weights and sleep, for the engine itself and for its worker process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.process.gpu_processes import Inventory, nvidia_inventory
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.vllm.keyed_sampler import SAMPLE_ARGUMENT
from rft_engine.vllm.lora import loads_adapter
from rft_engine.vllm.media import check_expanded, request_of, takes_images
from rft_engine.vllm.out_of_memory import memory_error
from rft_engine.vllm.runtime import Llm, VllmRuntime
from rft_engine.vllm.settings import cannot_sleep_on_cpu, llm_arguments
from rft_engine.vllm.weight_transport import resolve_transport
from rft_engine.weight_sync.weight_errors import require_version

_REMEDY = "see vLLM's message; --engine_type native runs without it"


class LocalVllm:
    """A started vLLM and the version of the weights it serves."""

    def __init__(
        self,
        settings: ExternalEngineSettings,
        runtime: VllmRuntime,
        *,
        in_process: bool,
        inventory: Inventory = nvidia_inventory,
    ) -> None:
        """Start vLLM in this process.

        Args:
            settings: the model and its sizes.
            runtime: vLLM, or a double of it.
            in_process: whether weights are in this process too.
            inventory: processes that hold the GPUs, queried when there is no room.

        Raises:
            OptionsError: a setting that this build of vLLM cannot carry out.
            ServiceError: vLLM did not start: the setting to change where memory was short, else its own message.
        """
        self._settings, self._runtime = settings, runtime
        arguments = llm_arguments(settings, is_cpu=runtime.is_cpu)
        transport = resolve_transport(settings, is_cpu=runtime.is_cpu, in_process=in_process)
        if transport in ("ipc", "nccl"):
            arguments["weight_transfer_backend"] = transport
        try:
            self._llm: Llm = runtime.make_llm(arguments)
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            raise memory_error(settings, str(error), inventory) or settings.not_started(error, _REMEDY) from error
        self.version = 0
        self._request_options: dict[str, Any] = {}
        """Of every request: the adapter, once there is one."""
        self._serial = itertools.count()
        config = self._llm.llm_engine.model_config
        self.facts = EngineFacts(
            dtype=str(config.dtype).removeprefix("torch."),
            vocab_size=int(config.get_vocab_size()),
            is_cpu=runtime.is_cpu,
            transport=transport,
        )

    @property
    def is_alive(self) -> bool:
        """Always True: an engine in this process lives as long as the process."""
        return True

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]:
        """Yield results as samples finish, then the counts; requests that are left when it ends early are dropped.

        Raises:
            ServiceError: the call is for other weights, took longer than `seconds`, or vLLM picked a
                token that was not drawn.
        """
        require_version(call.version, self.version)
        engine = self._llm.llm_engine
        deadline = time.monotonic() + seconds
        # before the first request: its first step already asks for the draw under its key
        self.rpc("rft_begin", [call.options, list(call.keys), call.constraint])
        pending = self._submit(call)
        num_total, num_steps = len(pending), 0
        num_prefill, preempted = 0, list[int]()
        try:
            while pending:
                # between two steps only: a step that hangs must be ended from outside this process
                if time.monotonic() > deadline:
                    raise self._settings.too_slow(num_total - len(pending), num_total, seconds)
                finished = [output for output in engine.step() if output.finished]
                num_steps += 1
                num_prefill += sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in finished)
                preempted += [o.metrics.num_preemptions for o in finished if getattr(o, "metrics", None) is not None]
                if call.media:
                    owners = dict(call.requests)
                    for output in finished:
                        sample = pending[output.request_id]
                        check_expanded(sample, call.prompts[owners[sample]], output.prompt_token_ids)
                yield from self._results(call, [(pending.pop(o.request_id), o.outputs[0]) for o in finished])
            yield StepCounts(num_steps, num_prefill, sum(preempted) if preempted else None)
        finally:
            if pending:
                # also when the caller stops iterating: the requests would take rows of the next call
                engine.abort_request(list(pending))

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        """Call a method of every worker by name; one result each."""
        answers = self._llm.collective_rpc(method, timeout=seconds, args=tuple(arguments))
        if loads_adapter(method):
            # after the load: until then requests are drawn with the adapters before
            self._request_options = {"lora_request": self._runtime.make_adapter_request(str(arguments[0]))}
        return answers

    def serve(self, version: int) -> None:
        """Serve the weights loaded last as `version`; keys and values of older weights are dropped."""
        # vLLM returns False and drops nothing while a block is in use
        if not self._llm.reset_prefix_cache():
            raise ServiceError(
                code="engine.vllm.prefix_cache",
                what="vLLM did not drop its prefix cache when asked to",
                where=f"load_weights({version})",
                why="keys and values of older weights would be served with the new ones",
                state="the engine refuses to generate until a load succeeds",
                do=f"load_weights({version}) when no request is under way",
            )
        if takes_images(self._settings):
            self._llm.llm_engine.reset_encoder_cache()  # features of older weights
        self.version = version

    def sleep(self, level: int) -> None:
        """Level 1 moves the weights to the host and frees the cache, level 2 frees both.

        Raises:
            OptionsError: on a CPU.
        """
        if self._runtime.is_cpu:
            raise cannot_sleep_on_cpu(self._settings, f"sleep(level={level})")
        self._llm.sleep(level=level)

    def wake(self, tags: list[str]) -> None:
        """Take memory again for "weights", "kv_cache" or both."""
        self._llm.wake_up(tags)

    def close(self) -> None:
        self._runtime.shut_down(self._llm)

    def _submit(self, call: GenerateCall) -> dict[str, int]:
        """Submit every request; return internal name -> sample."""
        # a number of the call in every name: what is left of an aborted call is not taken for a request of this one
        serial = next(self._serial)
        pending: dict[str, int] = {}
        for sample, prompt in call.requests:
            params = self._runtime.make_sampling_params(
                temperature=1.0,  # ours is applied by the draw
                max_tokens=call.budget(sample),
                stop_token_ids=list(call.options["stop_token_ids"]),
                ignore_eos=True,
                detokenize=False,
                extra_args={SAMPLE_ARGUMENT: sample},
            )
            name = f"{serial}-{sample}"
            request = request_of(call.prompts[prompt], call.media[prompt] if call.media else None)
            self._llm.llm_engine.add_request(name, request, params, **self._request_options)
            pending[name] = sample
        return pending

    def _results(self, call: GenerateCall, finished: Sequence[tuple[int, Any]]) -> Iterator[SampleResult]:
        """Yield records of the samples that are done, checked against the tokens that vLLM picked."""
        if not finished:
            return
        samples = [sample for sample, _ in finished]
        # one call for all samples of a step, not one for each
        drawn = self.rpc("rft_pop_samples", [samples, [len(output.token_ids) for _, output in finished]])[0]
        for (sample, output), record in zip(finished, drawn, strict=True):
            # vLLM picks the token itself: with another one the log-probs would not be those of the text
            if list(output.token_ids) != record["token_ids"]:
                raise _not_drawn(sample, list(output.token_ids), record["token_ids"])
            reason = output.finish_reason
            if call.constraint is not None and reason == "length":
                reason = "stop"  # all sequences have that length
            yield SampleResult(
                sample=sample,
                token_ids=record["token_ids"],
                logprobs=record["logprobs"],
                log_kept_mass=record["log_kept_mass"],
                finish_reason=reason,
                version=self.version,
            )


def _not_drawn(sample: int, picked: list[int], drawn: list[int]) -> ServiceError:
    index = next((i for i, pair in enumerate(zip(picked, drawn, strict=True)) if pair[0] != pair[1]), 0)
    return ServiceError(
        code="engine.vllm.not_drawn",
        what=f"sample {sample}: vLLM chose token {picked[index]} where {drawn[index]} was drawn, at index {index}",
        where="vLLM engine",
        why="log-probabilities belong to the tokens that were drawn",
        state="no sample of this call was used",
        do="report this with the model and vLLM's version; --engine_type native until then",
    )
