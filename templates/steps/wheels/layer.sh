#!/bin/bash
# layer.sh [NAME==VERSION --hash=...]: make the layer of one wheel, or of those that are mounted at /built.
set -Eeuo pipefail
here=$(dirname "$0")
if [ $# -gt 0 ]; then
  mkdir /built
  echo "$@" >/built/wheels.lock
fi
"$here/install.sh" /opt/venv/bin/python --python-platform "$WHEEL_PLATFORM" --prefix /out/opt/venv
"$here/set_apart.py"
"$here/seal.sh"
