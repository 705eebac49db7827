#!/usr/bin/env bash
# Builds the kernels that store rows to several places, and says what multiprocessors store.
#   tests/gpu/harness/run_stores.sh build     compile only (no GPU needed)
#   tests/gpu/harness/run_stores.sh [time]
# NVCC and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. tests/gpu/harness/build_harness.sh
what=${1:-time}
program=${BUILD_DIR:-build/gpu-stores}/stores_main
if [ "$what" = build ] || ! [ -x "$program" ]; then
  build_harness "$program" tests/gpu/harness/stores_main.cu
fi
if [ "$what" = time ]; then "$program"; fi
