#!/bin/bash
# install.sh PYTHON OPTION...: install the wheels of /built/wheels.lock, and those in /built of what /built/pins names.
# Nothing is built, and nothing is cached: uv compares every archive with the lock as it unpacks it. The options are
# those of 'uv pip install' and say where to.
set -Eeuo pipefail
. "$(dirname "$0")/uv.sh"
install() { uv pip install --quiet --no-deps --no-build --python "$@"; }
find=() pins=()
[ ! -d /wheels ] || find=(--find-links /wheels)
[ ! -s /built/pins ] || mapfile -t pins </built/pins
[ ! -s /built/wheels.lock ] || install "$@" --require-hashes "${find[@]}" -r /built/wheels.lock
[ -z "${pins[*]-}" ] || install "$@" --no-index --find-links /built "${pins[@]}"
mkdir -p /out # of nothing, if nothing is locked
find /out -maxdepth 3 -name .lock -delete
