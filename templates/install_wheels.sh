#!/bin/bash
# install-wheels PLATFORM [OPTION...]: install /locks/wheels.lock for it below /out, where the files are in the image, and
# nothing else. The options are those of 'uv pip install'.
set -Eeuo pipefail
[ ! -s /run/secrets/ca.pem ] || export SSL_CERT_FILE=/run/secrets/ca.pem
[ ! -s /run/secrets/uv.toml ] || export UV_CONFIG_FILE=/run/secrets/uv.toml NETRC=/run/secrets/netrc
options=()
[ -z "${INDEX_URL-}" ] || export UV_INDEX="$INDEX_URL" UV_INDEX_STRATEGY=unsafe-best-match
# The same address with credentials, which a list of processes would show as an option.
[ ! -s /run/secrets/index ] || UV_INDEX=$(</run/secrets/index)
[ ! -d /wheels ] || options+=(--find-links /wheels)
# Packages without a wheel are built with the setuptools of images/uv.lock, not with the newest.
uv pip install --quiet --no-deps --require-hashes --build-constraint /locks/uv.lock --python /opt/venv/bin/python \
  --python-platform "$1" --prefix /out/opt/venv "${options[@]}" "${@:2}" -r /locks/wheels.lock
rm -f /out/opt/venv/.lock
set-apart
find /out -type f -printf '%P\n' | sort >/for-site/files
seal
