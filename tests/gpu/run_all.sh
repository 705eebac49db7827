#!/usr/bin/env bash
# Builds, checks and times everything that needs GPUs, in one call, with a table at the end.
#   tests/gpu/run_all.sh LOGS [part ...]
# Every part has a time limit and a log in the folder LOGS. Without parts, all but `cases`, `shared`, `kills`, `nccl*`,
# `block_*`, `rows_memcheck`, `figures`:
#   build       both native libraries and the kernels' harness
#   kernels     every kernel against the reference, without JAX
#   gemm        grouped products against sums in f64, without JAX
#   block       block calls that overlap exchanges with products beside those that do not, and times
#   tests       this folder's tests
#   plain       the same without XLA's command buffers
#   cases       every case of token movement in every layout of processes
#   shared      jobs whose processes share the GPUs, two to each or four on one: TEST_GPU_RANKS says how many
#   kills       processes killed anywhere in a training step, 25 times in each of four jobs at once
#   nccl        communicators without JAX, and transport nccl in one process, on one daemon
#   nccl_block  block calls over nccl, in one process
#   nccl_jobs   the same with several processes, and processes that are killed, ten times
#   nccl_domains  two daemons as two NVLink domains of one host, each with half of the GPUs: every
#               case, 2,000 steps, kills
#   nccl_four   every case there with a process for each GPU
#   nccl_hidden how much of the network there hides behind experts, in chunks
#   soak        10,000 steps with random delays, one process
#   processes   5,000 of them, one process for each GPU
#   memcheck, racecheck   compute-sanitizer on small shapes, two ranks on one GPU
#   block_memcheck, block_racecheck   the same over block calls, forward and backward
#   rows_memcheck   the same over drawn layouts of rows, each array in memory of its own
#   demo        `doctor`, the demo against its twin on plain JAX collectives, with a process for each GPU
#   bench       dispatch and combine beside the link's ceiling and XLA's collectives
#   figures     what results.md tells of a host: movement by tokens, routing and SMs, layers, a step
# Variables: PYTHON; PREBUILT, a folder with libep_runtime_cpu.so, libep_runtime_cuda.so and programs of
# harness/ (or some of them) to use as they are; BUILD_DIR; TESTS, more arguments of pytest;
# BENCH, arguments of `ep-runtime bench`; DOSE, kills of each job; TEST_GPU_COUNT=8, all of eight GPUs, of which
# the parts with Python take four otherwise. Exits with 1 where a part failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
logs=${1:?folder for the logs}
shift
parts=("$@")
if [ ${#parts[@]} = 0 ]; then
  parts=(build kernels gemm block tests plain soak processes memcheck racecheck demo bench)
fi
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
python=${PYTHON:-python3}
build=${BUILD_DIR:-build/gpu-all}
prebuilt=${PREBUILT:-}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
most=${TEST_GPU_COUNT:-4}
soak_gpus=$((gpus >= most ? most : gpus))
export python build prebuilt logs gpus soak_gpus
# The tests' own process and those that it starts share the GPUs. Tuning matmuls takes most of a
# small program's compile time and tells nothing here.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"
export PYTHONPATH="$PWD:$PWD/server:$PWD/client:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"

harness() {  # a program of harness/: PREBUILT's, or built here
  local at=$build/$1
  if [ -n "$prebuilt" ] && [ -x "$prebuilt/$1_main" ]; then at=$prebuilt; fi
  BUILD_DIR=$at OBJECTS=$build tests/gpu/harness/run.sh "$@"
}
part_build() {
  mkdir -p ep_runtime/_native
  if [ -n "$prebuilt" ] && [ -e "$prebuilt/libep_runtime_cuda.so" ]; then
    cp "$prebuilt"/libep_runtime_*.so ep_runtime/_native/
  else
    cmake -S csrc -B "$build" -G Ninja -DEP_RUNTIME_CUDA=ON \
      -DPython_EXECUTABLE="$(command -v "$python")"
    cmake --build "$build"
    cp "$build"/cpu/libep_runtime_cpu.so "$build"/cuda/libep_runtime_cuda.so ep_runtime/_native/
  fi
  if ! [ -x "$prebuilt/kernels_main" ]; then harness kernels build; fi
  ls -l ep_runtime/_native
}
part_kernels() {
  harness kernels check
  harness plans check
}
part_gemm() { harness gemm check; }
part_block() { harness block all; }
gpu_tests() {
  # 5: the options choose none of these files' tests.
  "$python" -m pytest -q -p no:cacheprovider -p no:benchmark --durations=12 --timeout=200 "$@" \
    ${TESTS:-} || [ $? = 5 ]
}
part_tests() {
  local at=tests/gpu/test_gpu
  # Most of these tests' time XLA compiles, and none waits for another process: eight at once.
  local compiling=("$at"_{fp8,gemm,rows,fewer_passes,sharding,debug_nans,pairs,loops,block,block_recipes,training,movement,settings,limits}.py)
  # Jobs whose processes start, and wait for each other, for most of their time: four at once.
  local jobs=("$at"_{processes,faults,warm_starts}.py)
  gpu_tests -n 8 "${compiling[@]}" "$@"
  gpu_tests -n 4 "${jobs[@]}" "$@"
  # These share the GPUs with nobody: they measure memory, or take all of it.
  local shared=("${compiling[@]}" "${jobs[@]}" "$at"_{nccl,compiled_ahead}.py)
  gpu_tests tests/gpu "${shared[@]/#/--ignore=}" "$@"
}
nccl_tests() {
  # Multicast fails on some hosts, and NCCL sets it up unasked; NCCL says what it does in the log.
  NCCL_NVLS_ENABLE=0 NCCL_DEBUG=${NCCL_DEBUG:-WARN} "$python" -m pytest \
    tests/gpu/test_gpu_nccl.py -q -x -p no:cacheprovider --durations=12 --timeout=300 \
    -m "slow or not slow" -k "$1" ${TESTS:-}
}
part_nccl() {
  NCCL_NVLS_ENABLE=0 "$python" tests/gpu/tools/nccl_check.py
  nccl_tests "not processes and not domains and not killed and not starts"
}
part_nccl_block() {
  TEST_GPU_TRANSPORT=nccl NCCL_NVLS_ENABLE=0 gpu_tests -n 4 tests/gpu/test_gpu_block{,_recipes}.py
}
part_nccl_jobs() { nccl_tests "processes or starts or (killed and not domains)"; }
part_nccl_domains() { nccl_tests "domains and not four and not hide"; }
part_nccl_hidden() { TESTS="--dose full ${TESTS:-}" nccl_tests "hide"; }
part_nccl_four() { nccl_tests "domains and four"; }
part_plain() {
  XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer=" part_tests
}
part_cases() { gpu_tests tests/gpu/test_gpu_processes.py -m slow -k test_every_case; }
part_shared() {
  export TEST_GPU_RANKS=${TEST_GPU_RANKS:-$((gpus == 1 ? 4 : 2 * gpus))}
  gpu_tests tests/gpu/test_gpu_{processes,faults,named_ranks}.py -m "full or slow" -k "alone or killed or named"
}
part_kills() {
  NCCL_NVLS_ENABLE=0 gpu_tests -n 4 tests/gpu/test_gpu_kills.py -m slow --dose "${DOSE:-25}" \
    --timeout=$((60 + 20 * ${DOSE:-25})) -rA
}
part_soak() { "$python" tests/gpu/tools/soak.py --limit-s 150; }
part_processes() { "$python" tests/gpu/tools/soak.py --steps 5000 --limit-s 100 --gpus "$soak_gpus"; }
part_memcheck() { CUDA_VISIBLE_DEVICES=0 harness kernels memcheck 2; }
part_racecheck() { CUDA_VISIBLE_DEVICES=0 harness kernels racecheck 2; }
part_block_memcheck() { CUDA_VISIBLE_DEVICES=0 harness block memcheck 2; }
part_block_racecheck() { CUDA_VISIBLE_DEVICES=0 harness block racecheck 2; }
part_rows_memcheck() {
  CUDA_VISIBLE_DEVICES=0 XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck \
    --report-api-errors no --error-exitcode 3 "$python" -m pytest -q -p no:cacheprovider \
    tests/gpu/test_gpu_rows.py -k any_layout
}
part_demo() {
  "$python" -m ep_runtime_client.cli doctor
  local demo=("$python" -m ep_runtime_client.cli demo --platform gpu --layers 1)
  "${demo[@]}" --devices "$soak_gpus" --steps 20 --compare
  "${demo[@]}" --devices "$soak_gpus" --processes "$soak_gpus" --steps 10
}
part_bench() {
  # Times are taken as users have them: with tuned matmuls.
  export XLA_FLAGS="${XLA_FLAGS/--xla_gpu_autotune_level=0/}"
  "$python" -m ep_runtime_client.cli bench \
    ${BENCH:-dispatch combine --transports nvlink,xla} --save "$logs/bench.json"
}
part_figures() {
  export XLA_FLAGS="${XLA_FLAGS/--xla_gpu_autotune_level=0/}"
  local bench=("$python" -m ep_runtime_client.cli bench) cases=deepseek-like
  if [ "$gpus" -ge 8 ]; then cases=deepseek-like,deepseek-v3-like; fi
  "${bench[@]}" dispatch combine --transports nvlink --tokens 128,4096,8192 --routing uniform,zipf,one \
    --sms 24,32,40 --save "$logs/movement.json"
  "${bench[@]}" moe --transports nvlink,stock-padded --cases "$cases" --save "$logs/moe.json"
  "${bench[@]}" train --transports nvlink,stock --save "$logs/train.json"
}

limit_of() {
  case $1 in
    build | nccl*) echo 560 ;;
    figures) echo 590 ;;
    kills) echo $((60 + 40 * ${DOSE:-25})) ;;
    cases | shared) echo 420 ;;
    tests | plain | bench | racecheck) echo 300 ;;
    soak | processes) echo 260 ;;
    *) echo 180 ;;
  esac
}
for part in "${parts[@]}"; do
  if ! declare -F "part_$part" >/dev/null; then
    echo "unknown part: $part" >&2
    exit 2
  fi
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort | uniq -c
functions=$(declare -f)
table=()
failed=0
for part in "${parts[@]}"; do
  started=$SECONDS
  timeout -k 20 "$(limit_of "$part")" \
    bash -c "set -euo pipefail; $functions; part_$part" >"$logs/$part.log" 2>&1
  code=$?
  result=PASS
  if [ $code = 124 ] || [ $code = 137 ]; then result=TIMEOUT; elif [ $code != 0 ]; then result=FAIL; fi
  if [ $result != PASS ]; then
    failed=1
    echo "--- $part: exit code $code, the end of $logs/$part.log"
    tail -n 40 "$logs/$part.log"
  fi
  table+=("$(printf '%-10s %-8s %4d s  %s' "$part" "$result" $((SECONDS - started)) \
    "$(grep -v '^[[:space:]]*$' "$logs/$part.log" | tail -n 1 | cut -c1-90)")")
  echo "${table[-1]}"
done
echo
printf '%s\n' "${table[@]}"
exit $failed
