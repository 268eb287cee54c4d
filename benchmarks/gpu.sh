#!/usr/bin/env bash
# The first minutes on a GPU machine: build for this GPU alone, check every op, measure, and write what was seen to
# docs/gpu/<device>.json and .md. Under 8 minutes; no network.
#
#   bash benchmarks/gpu.sh [options of benchmarks/gpu.py]
#
# Needs Python with torch >= 2.11 (a CUDA build), numpy, pybind11, setuptools, ninja, pytest and hypothesis, and nvcc;
# with a build in place that has kernels for this GPU, carried here, no nvcc. PYTHON names another python3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin  # compute-sanitizer
begin=$SECONDS

architecture=$("$python" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') ||
  { echo "gpu.sh: torch sees no GPU here"; exit 2; }
# Kernels for this architecture, or for an earlier minor version of it.
carried() {
  "$python" - "$architecture" 2>/dev/null <<'PYTHON'
import sys
import engram
major, minor = map(int, sys.argv[1].split("."))
built = [text.removesuffix("+PTX").split(".") for text in (engram.build_info()["cuda"] or "").split(",") if "." in text]
sys.exit(not any(int(a) == major and int(b) <= minor for a, b in built))
PYTHON
}
if carried; then
  echo "gpu.sh: using the build that is here"
else
  mkdir -p build
  echo "gpu.sh: building for compute capability $architecture"
  ENGRAM_CUDA=1 TORCH_CUDA_ARCH_LIST=$architecture "$python" setup.py build_ext --inplace >build/gpu.log 2>&1 ||
    { tail -30 build/gpu.log; exit 1; }
fi
exec "$python" -m benchmarks.gpu --built-in $((SECONDS - begin)) "$@"
