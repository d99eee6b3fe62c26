#!/usr/bin/env bash
# Makes .venv from the hash-pinned scripts/requirements.lock. Called by make; runs again when the lock changes.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    if command -v "$candidate" >/dev/null 2>&1 \
      && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

apt_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
  printf 'setup: installing %s\n' "$*" >&2
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@"; } >&2
}

python=$(find_python)
if [ -z "$python" ]; then
  apt_install python3 python3-venv || die "needs Python 3.11 or newer with venv: install python3 and python3-venv"
  python=$(find_python)
  [ -n "$python" ] || die "needs Python 3.11 or newer; this system's python3 is older"
fi
rm -rf .venv/.ready
# One that works is brought up to date where it stands: whoever uses it meanwhile keeps a working one.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  if ! "$python" -m venv --clear .venv >/dev/null 2>&1; then
    # Debian and Ubuntu keep ensurepip in a package of its own.
    apt_install python3-venv || die "'$python -m venv' does not work: install python3-venv"
    "$python" -m venv --clear .venv >/dev/null || die "'$python -m venv .venv' failed"
  fi
fi
printf 'setup: installing what scripts/ and tests/ need into .venv\n' >&2
.venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes \
  --requirement scripts/requirements.lock || die "pip could not install scripts/requirements.lock (see above)"
touch .venv/.ready
