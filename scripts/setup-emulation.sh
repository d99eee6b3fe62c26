#!/usr/bin/env bash
# Lets this host's kernel run programs for arm64, under QEMU: images of that architecture can then be built, verified and
# trained in. It does nothing on an arm64 host, or if they run already.
#
# The kernel keeps the registration until it restarts. Containers need none of QEMU's files, as the flag F has it opened
# once: https://docs.kernel.org/admin-guide/binfmt-misc.html
#
# Environment:  TRAINYARD_SYSROOT      folder with the proc/ and usr/ of the host, for tests   [/]
# Exit status:  0 programs for arm64 run · 1 they do not, and cannot be made to (one line says what to do)
set -Eeuo pipefail

sysroot=${TRAINYARD_SYSROOT:-}
registry=$sysroot/proc/sys/fs/binfmt_misc
format=$sysroot/usr/lib/binfmt.d/qemu-aarch64.conf

say() { printf 'emulation: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
by_hand="run 'docker run --privileged --rm tonistiigi/binfmt --install arm64' (docs.docker.com/build/building/multi-platform), or build on an arm64 host"

case $(uname -m) in aarch64 | arm64) exit 0 ;; esac
[ "$(uname -s)" = Linux ] || die "not a Linux host: Docker Desktop runs programs for arm64 as it is; elsewhere $by_hand"
registered() { grep -qs '^enabled' "$registry"/qemu-aarch64; }
if registered; then exit 0; fi
[ "$(id -u)" = 0 ] || die "needs root: run 'sudo make setup EMULATION=1', or $by_hand"

if [ ! -e "$registry/register" ]; then
  mount -t binfmt_misc binfmt_misc "$registry" 2>/dev/null || die "this kernel has no binfmt_misc, or this is a container without the right to mount it: $by_hand"
  if registered; then exit 0; fi  # in a container: the kernel's registrations are those of its host
fi
if [ ! -e "$format" ]; then
  command -v apt-get >/dev/null 2>&1 || die "QEMU for arm64 is not installed: $by_hand"
  say "installing qemu-user-static"
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update && apt-get -qq install -y --no-install-recommends qemu-user-static >/dev/null || die "qemu-user-static cannot be installed: $by_hand"
fi
# systemd registers it when the package is installed; hosts without systemd do not.
if ! registered; then
  # A name that exists cannot be registered again; it may have been switched off.
  if [ -e "$registry/qemu-aarch64" ]; then
    echo 1 >"$registry/qemu-aarch64"
  else
    cat "$format" >"$registry/register"
  fi || die "the kernel refused QEMU for arm64: $by_hand"
fi
say "programs for arm64 run under QEMU: they start about 6 times slower than natively, and train far slower"
