#!/usr/bin/env bash
# Builds block calls with their harness, checks that calls that overlap give the bits of those that
# do not, and times both.
#   tests/gpu/harness/run_block.sh build              compile only (no GPU needed)
#   tests/gpu/harness/run_block.sh [check|small|time|sanitize|all] [ranks]
# Without ranks: one per GPU. NVCC, OBJECTS and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-all}
ranks=${2:-}
build=${BUILD_DIR:-build/gpu}
program=$build/block_main

build_all() {
  build_harness "$program" csrc/cuda/block/*.cc csrc/cuda/block/*.cu csrc/cuda/device/side_streams.cc \
    csrc/cuda/movement/{prepare,dispatch,combine}/*.cu csrc/cuda/rows/*.cu \
    csrc/cuda/gemm/*.cu csrc/cuda/gemm/*/*.cu csrc/cuda/gemm/*.cc tests/gpu/harness/block_main.cu
}

# A binary that travelled with the tree is used as it is, where it runs.
if [ "$what" = build ] || ! [ -x "$program" ]; then build_all; fi
case $what in
  build) ;;
  check | small | time) "$program" "$what" $ranks ;;
  sanitize)
    for tool in memcheck racecheck; do
      compute-sanitizer --tool "$tool" --error-exitcode 3 "$program" small "${ranks:-2}"
    done
    ;;
  all)
    "$program" check $ranks
    "$program" time $ranks
    ;;
  *)
    echo "unknown: $what (build, check, small, time, sanitize or all)" >&2
    exit 2
    ;;
esac
