#!/usr/bin/env bash
# Builds one program of this folder, checks kernels with it against references, and times them.
#   tests/gpu/harness/run.sh NAME build      compile only (no GPU needed)
#   tests/gpu/harness/run.sh block [check|small|time|memcheck|racecheck|all] [ranks]
#   tests/gpu/harness/run.sh kernels [check|small|time|few|warps|memcheck|racecheck|all] [ranks]
#   tests/gpu/harness/run.sh gemm [check|small|time|memcheck|all] [16|8|32|copies]
#   tests/gpu/harness/run.sh plans [check|all]
# block: calls that overlap give the bits of calls that do not. kernels: dispatch and combine. gemm: grouped matmuls
# against sums in f64. plans: plans of exchanges between nodes.
# Without ranks: one per GPU; more ranks than GPUs share them.
# Variables: NVCC; BUILD_DIR, the folder of the program and its objects; OBJECTS, a build folder of the CUDA
# library, whose objects are linked as they are.
set -euo pipefail
cd "$(dirname "$0")/../../.."
name=${1:-}
what=${2:-all}
more=(${3:+"$3"})
cuda=csrc/cuda here=tests/gpu/harness
case $name in
  block)
    sources=("$cuda"/block/*.cc "$cuda"/block/*.cu "$cuda"/device/side_streams.cc
      "$cuda"/movement/{prepare,dispatch,combine,copies}/*.cu "$cuda"/rows/*.cu
      "$cuda"/gemm/*.cu "$cuda"/gemm/*/*.cu "$cuda"/gemm/*.cc)
    known='build check small time memcheck racecheck all' ;;
  kernels)
    sources=("$cuda"/movement/*/*_kernels.cu csrc/core/memory/plan.cc "$here"/timing.cu)
    known='build check small time few warps memcheck racecheck all' ;;
  gemm)
    sources=("$cuda"/gemm/*.cu "$cuda"/gemm/*/*.cu "$cuda"/gemm/*.cc "$cuda"/rows/activation*.cu
      "$here"/gemm_{activation,case,copies}.cu "$here"/gemm_cases.cc)
    known='build check small time memcheck all' ;;
  plans)
    sources=("$cuda"/nccl/node_plan.cu csrc/core/memory/plan.cc)
    known='build check all' ;;
  *)
    echo "unknown: '$name' (block, kernels, gemm or plans)" >&2
    exit 2
    ;;
esac
if [[ " $known " != *" $what "* ]]; then
  echo "unknown: '$what' ($known)" >&2
  exit 2
fi
build=${BUILD_DIR:-build/gpu}
program=$build/${name}_main

nvcc=("${NVCC:-nvcc}" -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -lineinfo -Icsrc "-I$here")
# A binary that travelled with the tree is used as it is, if it can run.
if [ "$what" = build ] || ! [ -x "$program" ]; then
  mkdir -p "$build"
  objects=()
  for source in "${sources[@]}" "$here/${name}_main.cu"; do
    object=
    if [ -n "${OBJECTS:-}" ]; then
      object=$(find "$OBJECTS" -path "*ep_runtime_cuda*.dir*/$(basename "$source").o" -print -quit)
    fi
    if [ -z "$object" ]; then
      object=$build/$(basename "${source%.*}").o
      if [ ! "$object" -nt "$source" ] ||
        [ -n "$(find csrc/core "$cuda" "$here" -name '*.*h' -newer "$object" -print -quit)" ]; then
        "${nvcc[@]}" -c "$source" -o "$object"
      fi
    fi
    objects+=("$object")
  done
  "${nvcc[0]}" -cudart static "${objects[@]}" -o "$program"
fi

case $what in
  build) ;;
  memcheck | racecheck)
    if [ "$name" != gemm ]; then more=("${more[0]:-2}"); fi
    compute-sanitizer --tool "$what" --error-exitcode 3 "$program" small "${more[@]}"
    ;;
  all)
    "$program" check "${more[@]}"
    if [[ " $known " == *" time "* ]]; then "$program" time "${more[@]}"; fi
    ;;
  *) "$program" "$what" "${more[@]}" ;;
esac
