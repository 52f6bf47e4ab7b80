#!/usr/bin/env bash
# Builds the documentation into site/; a dead link, a dead anchor or a page that is missing from the navigation fails.
#
#   ci/docs.sh            build
#   ci/docs.sh serve      show it at http://127.0.0.1:8000 and build again at every change
#
# The generator runs outside of the project's environment, so that its requirements stay out of the lock.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdocs() {
    uv run --no-project --with mkdocs-material==9.8.1 mkdocs "$@"
}

if [ "${1:-}" = serve ]; then
    mkdocs serve
else
    mkdocs build --strict -d site
fi
