"""`rft-train generate`: answer prompts with a model."""

from __future__ import annotations

from rft.process.machine import open_machine
from rft.stages.answer_file import refuse_unwritable, write_answers
from rft.stages.generate import generate
from rft_cli.config.resolve import resolve
from rft_cli.config.stored_run import with_run
from rft_core.terminal_text import visible


def run(argv: list[str]) -> int:
    """Resolve, answer, print or write."""
    settings = resolve("generate", with_run(argv, "generate")).settings
    output = settings.output.output
    # every answer would be lost at the end
    refuse_unwritable(output)
    with open_machine(settings.model.device) as machine:
        rows = generate(settings, machine)
        if not machine.is_first:
            return 0
    if output:
        write_answers(output, rows)
        print(visible(f"{len(rows)} completions written to {output}"))
        return 0
    for row in rows:
        end = "" if row["finish_reason"] == "stop" else " [cut at the limit]"
        print(visible(f"{row['prompt']}{row['response']}{end}"))
    return 0
