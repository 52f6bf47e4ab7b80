"""Where training on images would start: refused in this version, with the reason.

`python examples/train_vl.py --pretrain MODEL --mixed_mm_data --packing_samples` ends with exit code 2.
Training on text is `examples/train.py`.
"""

from __future__ import annotations

import sys

from rft_algos.errors import OptionsError
from rft_cli import problems


def refusal() -> OptionsError:
    """Why nothing is started."""
    return OptionsError(
        code="example.no_images",
        what="training on images is not in this version",
        where="examples/train_vl.py",
        why="prompts are text: a vision-language model would be trained without ever seeing an image",
        do="python examples/train.py --pretrain MODEL --prompt_data train.jsonl",
    )


def main(argv: list[str]) -> int:
    """Say so, as every other refusal is said."""
    error = refusal()
    problems.show(error, as_json=problems.wants_json(argv))
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
