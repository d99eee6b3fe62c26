#!/bin/bash
# Install /locks/wheels.lock below /out, where the files are in the image, and nothing else. A folder at the top whose only
# file is an empty __init__.py is a package that several wheels share, such as nvidia: the file goes to /shared, and is in
# the layer of the stage 'site', so that no two layers have it.
set -Eeuo pipefail
[ ! -s /run/secrets/ca.pem ] || export SSL_CERT_FILE=/run/secrets/ca.pem
[ ! -s /run/secrets/uv.toml ] || export UV_CONFIG_FILE=/run/secrets/uv.toml NETRC=/run/secrets/netrc
options=()
[ -z "${INDEX_URL-}" ] || options+=(--index "$INDEX_URL" --index-strategy unsafe-best-match)
[ ! -d /wheels ] || options+=(--find-links /wheels)
# Packages without a wheel are built with the setuptools of images/uv.lock, not with the newest.
uv pip install --quiet --no-deps --require-hashes --build-constraint /locks/uv.lock --python /opt/venv/bin/python \
  --prefix /out/opt/venv "${options[@]}" -r /locks/wheels.lock
rm -f /out/opt/venv/.lock
mkdir /shared
cd /out/opt/venv/lib/python3*/site-packages
for file in */__init__.py; do
  [ -f "$file" ] && [ ! -s "$file" ] || continue
  [ "$(find "${file%/*}" -mindepth 1 -maxdepth 1 -type f | wc -l)" = 1 ] || continue
  [ -n "$(find "${file%/*}" -mindepth 1 -maxdepth 1 -type d -print -quit)" ] || continue
  install -D -m 644 "$file" "/shared$PWD/$file"
  rm "$file"
done
seal
