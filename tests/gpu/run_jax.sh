#!/usr/bin/env bash
# Builds both native libraries for the Python that runs, and runs the tests of this folder with
# XLA's command buffers on and off.
#   tests/gpu/run_jax.sh [pytest arguments]
# PYTHON and BUILD_DIR may be set.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=${BUILD_DIR:-build/gpu-jax}
cmake -S csrc -B "$build" -G Ninja -DEP_RUNTIME_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build "$build"
mkdir -p ep_runtime/_native
cp "$build"/libep_runtime_cpu.so "$build"/cuda/libep_runtime_cuda.so ep_runtime/_native/
export PYTHONPATH=.:server:client XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}
"$python" -m pytest tests/gpu "$@"
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" "$python" -m pytest tests/gpu "$@"
