#!/bin/bash
# Compile the extension modules of the repository, /tmp/extensions.tar, into the site directory $1. Of what its build makes
# only these are taken: its Python files are the code of the image, and may be newer.
set -Eeuo pipefail
for nvcc in /opt/venv/lib/python3*/site-packages/nvidia/cu*/bin/nvcc; do
  [ -x "$nvcc" ] && export CUDA_HOME="${CUDA_HOME:-${nvcc%/bin/nvcc}}" PATH="${nvcc%/nvcc}:$PATH"
done
mkdir /tmp/own /tmp/built && tar --extract --file /tmp/extensions.tar --directory /tmp/own
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0 LDFLAGS="-Wl,--strip-debug ${LDFLAGS-}"
export SETUPTOOLS_SCM_PRETEND_VERSION="${SETUPTOOLS_SCM_PRETEND_VERSION:-0}"
uv pip install --quiet --no-deps --offline --no-index --python /opt/venv/bin/python --no-build-isolation \
  --target /tmp/built /tmp/own
/opt/venv/bin/python /steps/extensions.py /tmp/built "/out/$1"
