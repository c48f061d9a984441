#!/usr/bin/env bash
# Check the package on one GPU, then measure it there; at most 10 minutes. Nothing is downloaded.
# With --wheels DIR the package and what it needs are installed from DIR into .venv-gpu; otherwise
# PYTHON (default: python3) has them, and this folder is read. Everything else goes to check_gpu.py:
# Paths are relative to the repository.
#   --device cpu   small sizes, on any machine     --part N   one part, for runs in several commands
#   --out DIR      JSON, tables and pictures       --minutes M
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [[ "${1:-}" == "--wheels" ]]; then
  "$python" -m venv .venv-gpu
  .venv-gpu/bin/pip install --quiet --no-index --find-links "$2" lightning-gnnpipe pytest psutil hypothesis matplotlib
  python=.venv-gpu/bin/python
  shift 2
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" scripts/check_gpu.py "$@"
