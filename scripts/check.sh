#!/usr/bin/env bash
# Install the package with its development tools into .venv, then lint, check types, build the
# documentation (warnings are errors) into site/, and test.
# With --slow the tests that take minutes run as well.
# PYTHON names the interpreter that makes the environment (default: python3.11).
set -euo pipefail
cd "$(dirname "$0")/.."

"${PYTHON:-python3.11}" -m venv .venv
.venv/bin/pip install --quiet -c constraints.txt torch==2.13.0
.venv/bin/pip install --quiet -c constraints.txt -e ".[dev]"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy & types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict  # with --quiet it would not see warnings
wait "$types"
chosen=()
if [[ "${1:-}" == "--slow" ]]; then chosen=(-m "slow or not slow"); fi
.venv/bin/pytest -n 3 --dist worksteal "${chosen[@]}"  # most tests wait for processes of their own
