#!/bin/bash
# Compile the source distributions of /sources/compiled. What builds them is installed beside the framework, which must be
# importable, so that builds are not isolated; it is not in the image.
set -Eeuo pipefail
local=(--no-deps --require-hashes --offline --no-index --python /opt/venv/bin/python)
local+=(--find-links /sources/build-requires --find-links /sources/compiled)
uv pip install --quiet "${local[@]}" --no-build -r /sources/build-requires/all.lock
# The CUDA compiler that a build requires is a wheel, which is unpacked into the folder of the framework's CUDA libraries:
# nvidia/cu13. That becomes the toolkit, but for the names that linkers look for, which wheels lack (libcudart.so).
for nvcc in /opt/venv/lib/python3*/site-packages/nvidia/cu*/bin/nvcc; do
  [ -x "$nvcc" ] || continue
  export CUDA_HOME="${CUDA_HOME:-${nvcc%/bin/nvcc}}" PATH="${nvcc%/nvcc}:$PATH"
  for library in "${nvcc%/bin/nvcc}"/lib/lib*.so.*; do
    [ -e "${library%.so.*}.so" ] || ln -s "${library##*/}" "${library%.so.*}.so"
  done
done
# Debugging information has paths of this build, other ones in each.
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0 LDFLAGS="-Wl,--strip-debug ${LDFLAGS-}"
mkdir -p /out
[ -s /sources/compiled/all.lock ] || exit 0
uv pip install --quiet "${local[@]}" --no-build-isolation --no-binary :all: --prefix /out/opt/venv \
  -r /sources/compiled/all.lock
rm -f /out/opt/venv/.lock
