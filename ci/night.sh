#!/usr/bin/env bash
# Tier 3: hundreds of kills, soaks, fuzzing, and every mutant of the equations. Takes hours on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m night
uv run python ci/mutate.py --jobs 2
