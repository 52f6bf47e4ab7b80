"""A reward model tested by itself, as LightRFT's guide names it.

python examples/test_reward_model.py --model RM
python examples/test_reward_model.py --model RM --pairs pairs.jsonl
"""

from __future__ import annotations

import sys

from rft_cli.commands.reward_probe import main
from rft_core.errors import RftError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RftError as error:
        print(error.problem.as_text(), file=sys.stderr)
        sys.exit(error.exit_code)
