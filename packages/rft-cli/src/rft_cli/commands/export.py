"""`rft-train export RUN DIR`: the model of a checkpoint as a Hugging Face directory, read back and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft_cli.commands import arguments
from rft_cli.pages.advice import after_model, next_lines
from rft_core.errors import OptionsError
from rft_core.terminal_text import visible

USAGE = """usage: rft-train export RUN DIR [--adapter] [--ema] [--dtype float32|bfloat16|float16]
                        [--push_to_hub ORG/NAME [--hub_public]]

Write the model of a checkpoint to DIR, a Hugging Face directory with its tokenizer, then read DIR back
and compare: every tensor to the bit, and the log-probabilities of a probe (of a reward model its scores).
RUN is a run (its newest checkpoint that verifies), a checkpoint (RUN/checkpoints/step_100,
RUN/episode_5) or a file of one. DIR must be empty or not there. --ema writes the moving averages that a
run with --enable_ema keeps in the place of the weights. Without --dtype the weights keep the type that
they have. --pretrain DIR trains on from it.

Of a run with --lora_rank the model has its adapters folded in; --adapter writes the adapters alone, as peft
loads them. RUN may be such a directory too, also one that peft wrote: it is folded into the weights under it.

--push_to_hub uploads DIR to the Hugging Face Hub once it is written and compared, with the token of `hf auth login` or
HF_TOKEN. A repository that is not there is made, private unless --hub_public is given; one that is there keeps its
visibility."""

_DTYPES = ("float32", "bfloat16", "float16")


def run(argv: list[str]) -> int:
    """Resolve, write beside the target, compare, give it its name."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    parsed = parse(argv)
    if len(parsed.words) < 2:
        raise _refusal("export.no_target", f"{parsed.word(0)!r} alone", "a checkpoint and a directory are needed")
    dtype = parsed.values.get("dtype", "")
    if dtype and dtype not in _DTYPES:
        raise _refusal("export.dtype", f"--dtype {dtype}", f"weights are written as {', '.join(_DTYPES)}")
    target = Path(parsed.word(1)).expanduser()
    # refused before torch is imported, which takes seconds
    refuse_full(target, parsed.word(0))
    repo = _repository(parsed)
    source, averages = Path(parsed.word(0)).expanduser(), "ema" in parsed.switches
    if "adapter" in parsed.switches or (source / "adapter_config.json").is_file():
        _export_adapters(source, target, lora_only="adapter" in parsed.switches, converted=bool(dtype) or averages)
    else:
        from rft.checkpoints.export import export

        _show(export(source, target, dtype, averages=averages), target)
    if repo:
        from rft.hub.upload import push

        print(visible("\n".join(push(target, repo, private="hub_public" not in parsed.switches))))
    return 0


def _repository(parsed: arguments.Arguments) -> str:
    """Return the repository that the export is uploaded to; empty for none.

    Raises:
        OptionsError: its name is none, no token is set, or a visibility is given without it.
    """
    repo = parsed.values.get("push_to_hub", "")
    if "push_to_hub" in parsed.values:
        # before the export, which takes minutes
        from rft.hub.upload import refuse_target

        refuse_target(repo)
    elif "hub_public" in parsed.switches:
        why = "it makes the repository of an upload public"
        raise _refusal("export.no_upload", "--hub_public without --push_to_hub", why, "DIR --push_to_hub ORG/NAME")
    return repo


def _show(lines: Sequence[str], model: Path) -> None:
    """Print what was written, and what can be done with it."""
    file = model / "config.json"
    # what comes next from a reward model is no training of the model itself
    scores = file.is_file() and '"reward_head"' in file.read_text()
    print("\n".join(lines if scores else [*lines, "", *next_lines(after_model(model))]))


def _export_adapters(source: Path, target: Path, *, lora_only: bool, converted: bool) -> None:
    """Export adapters out of a checkpoint, or merge a directory of adapters into the base weights."""
    if converted:
        why = "adapters are written in float32, as they were trained, and merged into weights that keep their type"
        raise _refusal("export.adapter_as_it_is", "--dtype or --ema with adapters", why)
    from rft.checkpoints.export_lora import export_adapter, export_merged

    if lora_only:
        print(visible("\n".join(export_adapter(source, target))))
    else:
        _show(export_merged(source, target), target)


def parse(argv: list[str]) -> arguments.Arguments:
    """Parse the checkpoint, the directory, the type of the weights, and where they are uploaded."""
    switches = ("ema", "adapter", "hub_public")
    return arguments.parse("export", argv, most=2, switches=switches, options=("dtype", "push_to_hub"))


def refuse_full(target: Path, source: str) -> None:
    """Refuse a target that holds files: an export of `source` never overwrites.

    Raises:
        OptionsError: `target` is a file, or a directory that holds something.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise _refusal(
            "export.exists", f"{target} is not empty", "an export never overwrites files", f"{target}-2", source
        )


def _refusal(code: str, what: str, why: str, other: str = "DIR", source: str = "RUN") -> OptionsError:
    return OptionsError(code=code, what=what, where="command line", why=why, do=f"rft-train export {source} {other}")
