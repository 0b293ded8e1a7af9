#!/bin/sh
# Everwarm beside llama-server on this machine's GPU; needs cmake, the CUDA toolkit and 30 GB in $MODEL_DIR, and no network.
#   bench/gpu.sh SOURCE [PHASE ...]     SOURCE: llama.cpp at the pinned tag, as `make libllama-cuda` unpacks it
#   bench/gpu.sh SOURCE acceptance [OPTION ...]     drafts by an MTP head, at the same acceptance on both servers
set -eu
source=${1:?give the folder of llama.cpp at the pinned tag}
shift
build=${BUILD:-build/bench-gpu/libllama}
out=${OUT:-build/bench-gpu}
model=${MODEL_DIR:-/dev/shm}/qwen35-27b-shape.gguf
python=${PYTHON:-python3}
PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

if ! test -x "$build/bin/llama-server"; then
  cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON \
    -DCMAKE_CUDA_ARCHITECTURES=native -DGGML_CUDA=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  cmake --build "$build" --target llama mtmd llama-server -j "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
fi
mtp=
case "${1:-}" in acceptance) mtp=--mtp model=${model%.gguf}-mtp.gguf ;; esac
test -f "$model" || "$python" -m bench.big_model "$model" $mtp
EVERWARM_LIBLLAMA=$PWD/$build/bin/libllama.so
case "$build" in /*) EVERWARM_LIBLLAMA=$build/bin/libllama.so ;; esac
export EVERWARM_LIBLLAMA
test -z "$mtp" || { shift; exec "$python" -m bench.acceptance --model "$model" --llama-server "$build/bin/llama-server" "$@"; }
exec "$python" -m bench.gpu --model "$model" --llama-server "$build/bin/llama-server" --out "$out" "$@"
