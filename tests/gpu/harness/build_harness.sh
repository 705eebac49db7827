# Sourced by the run_*.sh files: compiles kernels with their harness.
#   build_harness PROGRAM SOURCE...
# Objects lie beside PROGRAM and are made anew where the source or a header is newer. NVCC may be
# set, and OBJECTS: a build folder of the CUDA library, whose objects are then linked as they are.
build_harness() {
  local program=$1 nvcc=${NVCC:-nvcc}
  shift
  local flags=(-gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -lineinfo)
  flags+=(-Icsrc -Itests/gpu/harness)
  local folder source object objects=()
  folder=$(dirname "$program")
  mkdir -p "$folder"
  for source in "$@"; do
    object=
    if [ -n "${OBJECTS:-}" ]; then
      object=$(find "$OBJECTS" -path "*ep_runtime_cuda*.dir*/$(basename "$source").o" -print -quit)
    fi
    if [ -z "$object" ]; then
      object=$folder/$(basename "${source%.*}").o
      if [ ! "$object" -nt "$source" ] || [ -n "$(find csrc/core csrc/cuda tests/gpu/harness \
          -name '*.*h' -newer "$object" -print -quit)" ]; then
        "$nvcc" "${flags[@]}" -c "$source" -o "$object"
      fi
    fi
    objects+=("$object")
  done
  "$nvcc" -cudart static "${objects[@]}" -o "$program"
}
