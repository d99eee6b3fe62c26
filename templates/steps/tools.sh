#!/bin/bash
# Install uv with the hashes of uv.lock, which builds of packages find as /locks/uv.lock, and make an environment without
# packages: code of those of a base, which a .pth file names, runs whenever its Python starts. PYTHON is the interpreter
# of a base that holds a framework, or that has a Python which no Debian package brought.
set -Eeuo pipefail
install -D --mode=644 /steps/uv.lock /locks/uv.lock
[ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
options=(--only-binary :all: --require-hashes -r /locks/uv.lock)
apt-get -qq -o Acquire::Languages=none update
if [ -n "${PYTHON-}" ]; then
  apt-get -qq install -y --no-install-recommends ca-certificates python3-venv
  python3 -m venv /opt/uv
  /opt/uv/bin/pip install "${options[@]}"
else
  apt-get -qq install -y --no-install-recommends ca-certificates python3 python3-pip-whl
  # pip runs from the wheel that Debian's venv module uses, which saves installing six packages.
  PYTHONPATH=$(echo /usr/share/python-wheels/pip-*.whl) \
    python3 -m pip install --root-user-action=ignore --no-compile --target /opt/uv "${options[@]}"
fi
rm -rf /var/lib/apt/lists/*
uv venv --quiet --no-project --no-config --python "${PYTHON:-/usr/bin/python3}" "${UV_PYTHON%/bin/python}"
