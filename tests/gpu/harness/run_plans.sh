#!/usr/bin/env bash
# Builds the kernels that make plans between nodes, and checks them against plain loops on the host.
#   tests/gpu/harness/run_plans.sh build     compile only (no GPU needed)
#   tests/gpu/harness/run_plans.sh [check]
# NVCC, OBJECTS and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-check}
program=${BUILD_DIR:-build/gpu-plans}/plans_main
if [ "$what" = build ] || ! [ -x "$program" ]; then
  build_harness "$program" csrc/cuda/nccl/node_plan.cu csrc/core/memory/plan.cc \
    tests/gpu/harness/plans_main.cu
fi
if [ "$what" = check ]; then "$program"; fi
