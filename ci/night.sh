#!/usr/bin/env bash
# Tier 3: hundreds of kills, thousands of drawn faults, soaks, fuzzing, and every mutant of the equations. Takes hours on
# two cores. RFT_NIGHT_SHARE=0.1 takes a tenth of the drawn faults (N1 to N5, S1 to S4, H7 to H9 of docs/reliability.md).
# The programs against the sandbox (H7, H8) are left out, and counted as deselected, where there is no bubblewrap.
set -euo pipefail
cd "$(dirname "$0")/.."
uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m night
uv run pytest -s -m "night and system" tests/system || [ "$?" -eq 5 ] # 5: none was selected, for want of bubblewrap
ci/trackers.sh
uv run python ci/mutate.py --jobs 2
