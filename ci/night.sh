#!/usr/bin/env bash
# Tier 3: hundreds of kills, thousands of faults of numbers, soaks, fuzzing, and every mutant of the equations. Takes
# hours on two cores. RFT_NIGHT_SHARE=0.1 takes a tenth of the faults of numbers (N1 to N5 of docs/reliability.md).
set -euo pipefail
cd "$(dirname "$0")/.."
uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m night
uv run python ci/mutate.py --jobs 2
