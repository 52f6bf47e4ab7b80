"""Write down what the SGLang adapter uses of SGLang, read from the source of the pinned wheel; --check compares.

The wheel of the version in uv.lock is downloaded and parsed, never installed or imported, so that this runs where
SGLang cannot. The result is `rft_engine/sglang/pinned_api.json`: signatures and fields that the adapter's calls are
checked against in tests, and digests of functions whose behaviour it relies on. A digest that changed means: read
that function again, and `rft_engine/sglang/settings.py` with it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "packages" / "rft-engine" / "src" / "rft_engine" / "sglang" / "pinned_api.json"
SRT = "sglang/srt"

CALLS = {
    f"{SRT}/entrypoints/engine.py": [
        "Engine.__init__",
        "Engine.async_generate",
        "Engine.begin_weight_update",
        "Engine.update_weights_from_tensor",
        "Engine.end_weight_update",
        "Engine.flush_cache",
        "Engine.release_memory_occupation",
        "Engine.resume_memory_occupation",
        "Engine.shutdown",
    ],
    f"{SRT}/managers/tokenizer_manager.py": ["TokenizerManager.abort_request"],
}
"""Methods that are called, whole signatures."""

FIELDS = {
    f"{SRT}/sampling/sampling_params.py": {"SamplingParams": None},
    f"{SRT}/managers/io_struct.py": {
        name: None
        for name in (
            "UpdateWeightsFromTensorReqInput",
            "BeginWeightUpdateReqInput",
            "EndWeightUpdateReqInput",
            "ReleaseMemoryOccupationReqInput",
            "ResumeMemoryOccupationReqInput",
            "FlushCacheReqOutput",
        )
    },
}
"""Classes whose fields travel, all of them."""

SERVER_ARGS = [
    "attention_backend",
    "context_length",
    "custom_weight_loader",
    "disable_cuda_graph",
    "dtype",
    "enable_deterministic_inference",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "log_level",
    "max_running_requests",
    "mem_fraction_static",
    "model_path",
    "random_seed",
    "skip_tokenizer_init",
    "tp_size",
    "trust_remote_code",
]
"""Fields of ServerArgs that are set; they are declared in arg_groups/fields."""

BODIES = {
    f"{SRT}/layers/sampler.py": [
        "Sampler.forward",  # log-probs: of the logits over the temperature, before top-k and top-p
        "Sampler._sample_from_probs",
        "top_k_top_p_min_p_sampling_from_probs_torch",  # the cut, and no seed together with min-p
        "multinomial_with_seed",  # a draw is a function of seed, position and token id
        "sampling_from_probs_torch",
    ],
    f"{SRT}/layers/logprob_processor.py": ["OutputLogprobProcessor.compute_logprobs"],
    f"{SRT}/sampling/sampling_batch_info.py": ["SamplingBatchInfo.from_schedule_batch"],  # seeds: deterministic only
    f"{SRT}/sampling/sampling_params.py": ["SamplingParams.__post_init__", "raise_if_tokenizer_required"],
    f"{SRT}/managers/schedule_batch.py": ["Req._check_token_based_finish", "Req.output_ids_through_stop"],
    f"{SRT}/managers/scheduler.py": ["Scheduler.init_req_max_new_tokens", "Scheduler.flush_cache"],
    f"{SRT}/managers/scheduler_components/weight_updater.py": [
        "SchedulerWeightUpdaterManager.begin_weight_update",
        "SchedulerWeightUpdaterManager.update_weights_from_tensor",
        "SchedulerWeightUpdaterManager.end_weight_update",
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        "SchedulerWeightUpdaterManager.resume_memory_occupation",
    ],
    f"{SRT}/model_executor/model_runner_components/weight_updater.py": ["WeightUpdater.update_weights_from_tensor"],
    f"{SRT}/configs/model_config.py": ["ModelConfig._get_hf_eos_token_id", "ModelConfig._derive_context_length"],
    f"{SRT}/managers/tokenizer_manager.py": ["TokenizerManager.detokenize_logprob_tokens"],
}
"""Functions whose behaviour is relied upon."""


def pinned_version() -> str:
    """Of SGLang in uv.lock."""
    found = re.search(r'name = "sglang"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text())
    assert found, "uv.lock pins no sglang"
    return found[1]


def download(version: str, directory: Path) -> Path:
    """The wheel, by pip or by uv's pip."""
    asked = ["download", f"sglang=={version}", "--no-deps", "--only-binary", ":all:", "-d", str(directory)]
    for command in ([sys.executable, "-m", "pip"], ["pip"], ["python3", "-m", "pip"]):
        if subprocess.run([*command, *asked], capture_output=True).returncode == 0:
            return next(directory.glob("*.whl"))
    raise SystemExit(f"no pip here could download sglang=={version}; give a wheel: {sys.argv[0]} [--check] WHEEL")


def surface(wheel: Path, version: str) -> dict[str, Any]:
    """What is written down of one wheel."""
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    bodies = {f"{path}:{name}": _digest(_find(texts, path, name)) for path, names in BODIES.items() for name in names}
    return {
        "version": version,
        "calls": {name: _signature(_find(texts, path, name)) for path, names in CALLS.items() for name in names},
        "fields": {
            "ServerArgs": _server_args(texts),
            **{name: _fields(_find(texts, path, name)) for path, names in FIELDS.items() for name in names},
        },
        "attributes": {
            "Engine": _attributes(_find(texts, f"{SRT}/entrypoints/engine.py", "Engine.__init__")),
        },
        "bodies": bodies,
    }


def _find(texts: dict[str, str], path: str, dotted: str) -> Any:
    """The class or function of that name."""
    node: Any = ast.parse(texts[path])
    for part in dotted.split("."):
        named = (child for child in node.body if getattr(child, "name", None) == part)
        node = next(named, None)
        assert node is not None, f"{path} has no {dotted}"
    return node


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The parameters with their defaults, as in the source without annotations."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    kind = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{kind}({ast.unparse(function.args)})"


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id, child.value and ast.unparse(child.value)


def _fields(node: ast.ClassDef) -> dict[str, str | None]:
    """Name -> default; null = required."""
    return dict(_annotated(node))


def _server_args(texts: dict[str, str]) -> dict[str, str | None]:
    declared: dict[str, str | None] = {}
    for path, text in texts.items():
        if path.startswith(f"{SRT}/arg_groups/fields/"):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    declared |= dict(_annotated(node))
    absent = [name for name in SERVER_ARGS if name not in declared]
    assert not absent, f"ServerArgs has no {absent}"
    return {name: declared[name] for name in SERVER_ARGS}


def _attributes(function: ast.FunctionDef) -> list[str]:
    """Names of `self.NAME = ...`."""
    targets = (t for node in ast.walk(function) if isinstance(node, ast.Assign) for t in node.targets)
    return sorted({t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"})


def _digest(node: ast.AST) -> str:
    """Of the code without its layout and comments."""
    return hashlib.blake2b(ast.unparse(node).encode(), digest_size=8).hexdigest()


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Places where two snapshots differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{place}/{key}")
    elif old != new:
        yield f"{place}: {old} -> {new}"


def main(arguments: list[str]) -> int:
    """Write the snapshot, or compare it (--check)."""
    version = pinned_version()
    given = [Path(argument) for argument in arguments if not argument.startswith("--")]
    with tempfile.TemporaryDirectory() as directory:
        found = surface(given[0] if given else download(version, Path(directory)), version)
    if "--check" in arguments:
        changed = list(differences(json.loads(SNAPSHOT.read_text()), found))
        print("\n".join(changed) or f"{SNAPSHOT.name} is what sglang {version} has")
        return int(bool(changed))
    SNAPSHOT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{SNAPSHOT.relative_to(ROOT)}: sglang {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
