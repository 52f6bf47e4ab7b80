"""A reward model tested by itself, as LightRFT's guide names it: `rft-train rm-test` under its name.

python examples/test_reward_model.py --model RM
python examples/test_reward_model.py --model RM --pairs pairs.jsonl
"""

from __future__ import annotations

import sys

from rft_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["rm-test", *sys.argv[1:]]))
