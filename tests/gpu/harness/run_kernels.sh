#!/usr/bin/env bash
# Builds the kernels with their harness, checks them against the reference and times them.
#   tests/gpu/harness/run_kernels.sh build            compile only (no GPU needed)
#   tests/gpu/harness/run_kernels.sh [check|time|few|warps|sanitize|all] [ranks]
# Without ranks: one per GPU; more ranks than GPUs share them. NVCC, OBJECTS and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-all}
ranks=${2:-}
build=${BUILD_DIR:-build/gpu}
program=$build/kernels_main

build_all() {
  build_harness "$program" csrc/cuda/movement/*/*_kernels.cu csrc/core/memory/plan.cc \
    tests/gpu/harness/kernels_main.cu tests/gpu/harness/timing.cu
}

# A binary that travelled with the tree is used as it is, where it runs.
if [ "$what" = build ] || ! [ -x "$program" ]; then build_all; fi
case $what in
  build) ;;
  check | time | few | warps) "$program" "$what" $ranks ;;
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
    echo "unknown: $what (build, check, time, few, warps, sanitize or all)" >&2
    exit 2
    ;;
esac
