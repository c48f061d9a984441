#!/usr/bin/env bash
# Test with the oldest supported versions in .venv-oldest: the promises, checkpoints, private names.
# PYTHON names the interpreter (default: python3.11), TORCH the version of torch (default: the oldest,
# 2.4.0, whose build for GPUs is several GB).
set -euo pipefail
cd "$(dirname "$0")/.."

torch="${TORCH:-2.4.0}"
numpy="numpy"
[[ "$torch" == 2.4.* ]] && numpy="numpy<2"
"${PYTHON:-python3.11}" -m venv .venv-oldest
.venv-oldest/bin/pip install --quiet "torch==$torch" "$numpy"
.venv-oldest/bin/pip install --quiet -c constraints-oldest.txt "torch==$torch" "$numpy" -e . pytest psutil rich tensorboard
# torch 2.4 starts processes to compile in as soon as torch.compile is called, and keeps them.
TORCHINDUCTOR_COMPILE_THREADS=1 .venv-oldest/bin/pytest -q tests/test_compat.py tests/test_imports.py tests/test_strategy.py \
  tests/test_checkpoints.py tests/promises/test_p1_transparency.py tests/promises/test_p2_stale_gradient.py \
  tests/promises/test_p3_s_invariance.py tests/promises/test_p5_bytes.py tests/promises/test_p6_resume.py
