#!/usr/bin/env bash
# Builds the grouped products with their harness, checks them against sums in f64 and times them.
#   tests/gpu/harness/run_gemm.sh build     compile only (no GPU needed)
#   tests/gpu/harness/run_gemm.sh [check|small|time|sanitize|dense|all] [16|8|32|copies]
# The second word picks a part of check, small and time. dense: the same work as one torch.matmul. NVCC, OBJECTS, BUILD_DIR and PYTHON may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-all}
build=${BUILD_DIR:-build/gpu}
program=$build/gemm_main

build_all() {
  build_harness "$program" csrc/cuda/gemm/*.cu csrc/cuda/gemm/*/*.cu csrc/cuda/gemm/*.cc \
    tests/gpu/harness/gemm_*.cu tests/gpu/harness/gemm_*.cc
}

# A binary that travelled with the tree is used as it is, where it runs.
if [ "$what" = build ] || ! [ -x "$program" ]; then build_all; fi
case $what in
  build) ;;
  check | small | time) "$program" "$what" "${2:-}" ;;
  sanitize) compute-sanitizer --tool memcheck --error-exitcode 3 "$program" small ;;
  dense) "${PYTHON:-python3}" tests/gpu/tools/dense_gemm.py ;;
  all)
    "$program" check
    "${PYTHON:-python3}" tests/gpu/tools/dense_gemm.py
    "$program" time
    ;;
  *)
    echo "unknown: $what (build, check, small, time, sanitize, dense or all)" >&2
    exit 2
    ;;
esac
