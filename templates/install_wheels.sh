#!/bin/bash
# install-wheels PYTHON OPTION...: install the wheels of /locks/wheels.lock or, where `fetch-sources` was before, of
# /sources/wheels.lock, and those in /built of the others. Nothing is built, and nothing is cached: uv compares every
# archive with the lock as it unpacks it. The options are those of 'uv pip install' and say where to.
set -Eeuo pipefail
. /usr/local/bin/indexes
install() { uv pip install --quiet --no-deps --no-build --python "$@"; }
find=() lock=/locks/wheels.lock pins=()
[ ! -d /wheels ] || find=(--find-links /wheels)
[ ! -d /sources ] || lock=/sources/wheels.lock
[ ! -s /sources/pins ] || mapfile -t pins </sources/pins
[ ! -s "$lock" ] || install "$@" --require-hashes "${find[@]}" -r "$lock"
[ -z "${pins[*]-}" ] || install "$@" --no-index --find-links /built "${pins[@]}"
mkdir -p /out # of nothing, if nothing is locked
find /out -maxdepth 3 -name .lock -delete
