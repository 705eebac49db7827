#!/usr/bin/env bash
# Builds the kernels that go over rows with their harness, checks them against plain loops on the
# host and times them beside copies.
#   tests/gpu/harness/run_rows.sh build     compile only (no GPU needed)
#   tests/gpu/harness/run_rows.sh [check|small|time|sanitize|all]
# NVCC, OBJECTS and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-all}
build=${BUILD_DIR:-build/gpu-rows}
program=$build/rows_main

build_all() {
  build_harness "$program" csrc/cuda/rows/*.cu tests/gpu/harness/rows_*.cu tests/gpu/harness/rows_*.cc
}

# A binary that travelled with the tree is used as it is, where it runs.
if [ "$what" = build ] || ! [ -x "$program" ]; then build_all; fi
case $what in
  build) ;;
  check | small | time) "$program" "$what" ;;
  sanitize) compute-sanitizer --tool memcheck --error-exitcode 3 "$program" small ;;
  all)
    "$program" check | grep -v '^ok '
    "$program" time
    ;;
  *)
    echo "unknown: $what (build, check, small, time, sanitize or all)" >&2
    exit 2
    ;;
esac
