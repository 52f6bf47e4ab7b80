# Recipes for people who work on RFT; `just` alone lists them. CONTRIBUTING.md says when to use which.

[private]
default:
    @just --list --unsorted

# install the workspace and everything that its tests need
sync:
    uv sync

# read the code: lint, format, types, import contracts, generated pages, sizes
check:
    uv run ruff check .
    uv run ruff format --check .
    uv run bash -c 'pyright --pythonpath "$(which python)"'
    uv run lint-imports
    uv run python ci/generate_reference.py --check
    uv run python ci/check_size.py

# mend what ruff can mend
format:
    uv run ruff check --fix .
    uv run ruff format .

# tier 1, or the tests of one package: just test rft-algos
test PKG="":
    uv run pytest {{ if PKG == "" { "-n 2 --dist loadgroup" } else if PKG == "rft-kernels" { "kernels/tests" } else { "packages/" + PKG + "/tests" } }}

# tier 2: the long matrices
full:
    ci/full.sh

# packages alone, with nothing but what they declare; all of them, or those named
packages *NAMES:
    ci/packages.sh {{ NAMES }}

# what needs a GPU (gpu) or two (multigpu), with the installed torch
gpu *MARKER:
    ci/gpu.sh {{ MARKER }}

# build the documentation into site/; `just docs serve` shows it
docs *SERVE:
    ci/docs.sh {{ SERVE }}

# write the generated parts of the documentation anew
reference:
    uv run python ci/generate_reference.py
