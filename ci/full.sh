#!/usr/bin/env bash
# Tier 2: the matrices of kills, strategies, resumes and real engines that tier 1 shows one case of.
#
#   ci/full.sh           what tier 1 leaves out (tests/tier2_cases.txt)
#   ci/full.sh --all     both tiers, then each package alone
#   ci/full.sh --mutants what the tests of each package notice of small faults (docs/mutation.md), hours; RFT_MUTANTS=200
#                        takes so many of each package, drawn by a seed
#
# RFT_DATA_DIR names the folder of the public data sets; without it the tests that read them are left out and counted.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--mutants" ]; then
    reach="$(mktemp -d)"  # which test reaches which line: found once, used for every package
    for package in rft-algos rft-trainer rft-models rft-dist rft-engine rft rft-genrec rft-cli; do
        echo "== $package"
        required=0.95 whole=""
        [ "$package" = rft-algos ] || { required="${RFT_REQUIRED:-0.80}" whole="--whole_runs --reach $reach/kept"; }
        # shellcheck disable=SC2086
        uv run python ci/mutate.py --package "$package" --jobs "${RFT_TEST_PROCESSES:-2}" --required "$required" $whole \
            ${RFT_MUTANTS:+--sample "$RFT_MUTANTS" --seed 7}
    done
elif [ "${1:-}" = "--all" ]; then
    uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m "full or not full"
    ci/packages.sh
else
    uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m full
fi
