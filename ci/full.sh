#!/usr/bin/env bash
# Tier 2: the matrices of kills, strategies, resumes and real engines that tier 1 shows one case of.
#
#   ci/full.sh           what tier 1 leaves out (tests/tier2_cases.txt)
#   ci/full.sh --all     both tiers, then each package alone
#
# RFT_DATA_DIR names the folder of the public data sets; without it the tests that read them are left out and counted.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--all" ]; then
    uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m "full or not full"
    ci/packages.sh
else
    uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m full
fi
