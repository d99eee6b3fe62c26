#!/usr/bin/env bash
# Creates .venv with the packages of scripts/requirements.lock, pinned by hash, and with Trainyard itself as an editable
# install. make calls it when one of the files that it depends on has changed.
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

# Two calls of make at once: the second waits and finds everything done. macOS has no flock.
if command -v flock >/dev/null 2>&1; then
  exec 9<scripts
  flock 9
  if [ .venv/.ready -nt scripts/requirements.lock ] && [ .venv/.ready -nt pyproject.toml ] && [ .venv/.ready -nt "scripts/${0##*/}" ]; then
    exit 0
  fi
fi

python=$(find_python)
if [ -z "$python" ]; then
  apt_install python3 python3-venv || die "needs Python 3.11 or newer with venv: install python3 and python3-venv"
  python=$(find_python)
  [ -n "$python" ] || die "needs Python 3.11 or newer; this system's python3 is older"
fi
rm -f .venv/.ready
# A working environment is updated in place: processes that use it meanwhile keep running.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  if ! "$python" -m venv --clear .venv >/dev/null 2>&1; then
    # Debian and Ubuntu package ensurepip separately.
    apt_install python3-venv || die "'$python -m venv' does not work: install python3-venv"
    "$python" -m venv --clear .venv >/dev/null || die "'$python -m venv .venv' failed"
  fi
fi
pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)

# uv, itself from the lock, installs it in a tenth of pip's time: 15 s instead of 4 min (2 cores, 2026-11). It does not
# read pip's configuration, so pip takes over where only that names a package index that answers.
install_lock() {
  local lock=scripts/requirements.lock ca=/etc/ssl/certs/ca-certificates.crt
  awk '/^[a-z]/ { of_uv = /^uv==/ } of_uv' "$lock" >.venv/uv.lock
  "${pip[@]}" --require-hashes --requirement .venv/uv.lock || return
  if [ -z "${SSL_CERT_FILE:-}" ] && [ -s "$ca" ]; then export SSL_CERT_FILE=$ca; fi  # networks that inspect TLS
  .venv/bin/python -m uv pip install --quiet --python .venv/bin/python --require-hashes --requirement "$lock" \
    || { printf 'setup: uv could not install %s: trying pip\n' "$lock" >&2; "${pip[@]}" --require-hashes --requirement "$lock"; }
}

# A lock is installed once: .venv/.locked is the one that is.
if ! cmp -s scripts/requirements.lock .venv/.locked; then
  printf 'setup: installing scripts/requirements.lock into .venv\n' >&2
  install_lock || die "could not install scripts/requirements.lock (see above)"
  cp scripts/requirements.lock .venv/.locked
fi
"${pip[@]}" --no-deps --no-build-isolation --no-index --editable . || die "pip could not install this package (see above)"
touch .venv/.ready
