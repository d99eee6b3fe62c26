#!/usr/bin/env bash
# Lets this host's kernel run programs for arm64, under QEMU: images of that architecture can then be built, verified and
# trained in. It does nothing on an arm64 host, or if they run already under a QEMU that PyTorch runs in. On Debian, a newer
# QEMU comes from the backports of the same archive; apt's sources are not changed.
#
# The kernel keeps the registration until it restarts. Containers need none of QEMU's files, as the flag F has it opened
# once: https://docs.kernel.org/admin-guide/binfmt-misc.html
#
# Environment:  TRAINYARD_SYSROOT      folder with the proc/ and usr/ of the host, for tests   [/]
#               TRAINYARD_SETUP        the command that runs this, for messages                [make setup EMULATION=1]
# Exit status:  0 programs for arm64 run · 1 they do not, and cannot be made to (one line says what to do)
set -Eeuo pipefail

sysroot=${TRAINYARD_SYSROOT:-}
setup=${TRAINYARD_SETUP:-make setup EMULATION=1}
registry=$sysroot/proc/sys/fs/binfmt_misc
format=$sysroot/usr/lib/binfmt.d/qemu-aarch64.conf
# PyTorch 2.15 crashes in 7.2 and trains in 10.0 (2026-11); versions between were not tried.
tested=10

say() { printf 'emulation: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
by_hand="run 'docker run --privileged --rm tonistiigi/binfmt --install arm64' (docs.docker.com/build/building/multi-platform), or build on an arm64 host"

case $(uname -m) in aarch64 | arm64) exit 0 ;; esac
[ "$(uname -s)" = Linux ] || die "not a Linux host: Docker Desktop runs programs for arm64 as it is; elsewhere $by_hand"
registered() { grep -qs '^enabled' "$registry"/qemu-aarch64; }
# The major version of the QEMU that Debian's package has installed, nothing without it. The package's link runs under the
# kernel only; the file that it points to prints the version.
installed_version() {
  local program
  program=$(readlink -f "$sysroot/usr/libexec/qemu-binfmt/aarch64-binfmt-P") || return 0
  if [ -x "$program" ]; then "$program" --version | sed -n '1s/.* version \([0-9]*\).*/\1/p'; fi
}
is_old() { [ -n "$1" ] && [ "$1" -lt "$tested" ]; }
# Whether the kernel runs a QEMU that need not be replaced: a new one of the package, or any other program, such as that of
# Docker, whose version cannot be read here.
is_ready() {
  registered || return 1
  ! is_old "$(installed_version)" || ! grep -q '^interpreter .*/aarch64-binfmt-P$' "$registry/qemu-aarch64"
}
# One line about an old QEMU.
crashes() { printf '%s' "PyTorch crashes in QEMU 7.2, trains in 10.0, and this is $(installed_version): for a newer one"; }
if is_ready; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  registered || die "needs root: run 'sudo $setup', or $by_hand"
  say "$(crashes) run 'sudo $setup', or $by_hand"
  exit 0
fi

if [ ! -e "$registry/register" ]; then
  mount -t binfmt_misc binfmt_misc "$registry" 2>/dev/null || die "this kernel has no binfmt_misc, or this is a container without the right to mount it: $by_hand"
  # In a container, the kernel's registrations are those of its host.
  if is_ready; then exit 0; fi
fi

export DEBIAN_FRONTEND=noninteractive
apt_install() { apt-get -qq "$@" install -y --no-install-recommends qemu-user-static >/dev/null; }
# The major version that apt would install.
candidate_version() { apt-cache policy qemu-user-static | sed -n 's/^ *Candidate: \([0-9]*:\)\{0,1\}\([0-9]*\)\..*/\2/p'; }
# Installs it from the backports of the Debian archive that apt uses.
install_backport() {
  local site suite folder
  read -r site suite < <(apt-get indextargets --format '$(ORIGIN)|$(SITE) $(CODENAME)' 'Created-By: Packages' |
    sed -n 's/^Debian|\(.* [a-z]*\)$/\1/p' | sort -u) || return 1
  folder=$(mktemp -d)
  echo "deb $site $suite-backports main" >"$folder/backports.list"
  local options=(-o "Dir::Etc::SourceParts=$folder" -o APT::Get::List-Cleanup=0)
  apt-get -qq "${options[@]}" update && apt_install -t "$suite-backports" "${options[@]}"
  local status=$?
  rm -r "$folder"
  return "$status"
}

was_registered=
if [ ! -e "$format" ] || is_old "$(installed_version)"; then
  was_registered=$(if registered; then echo yes; fi)
  if command -v apt-get >/dev/null 2>&1; then
    say "installing qemu-user-static"
    if apt-get -qq update && { ! is_old "$(candidate_version)" || ! install_backport 2>/dev/null; }; then apt_install || true; fi
  fi
  if [ ! -e "$format" ]; then
    command -v apt-get >/dev/null 2>&1 || die "QEMU for arm64 is not installed: $by_hand"
    die "qemu-user-static cannot be installed: $by_hand"
  fi
  # The flag F keeps the replaced program open.
  if [ "$was_registered" ]; then echo -1 >"$registry/qemu-aarch64"; fi
fi
# systemd registers it when the package is installed; hosts without systemd do not.
if [ "$was_registered" ] || ! registered; then
  # A name that exists cannot be registered again; it may have been switched off.
  if [ -z "$was_registered" ] && [ -e "$registry/qemu-aarch64" ]; then
    echo 1 >"$registry/qemu-aarch64"
  else
    cat "$format" >"$registry/register"
  fi || die "the kernel refused QEMU for arm64: $by_hand"
fi
say "programs for arm64 run under QEMU: they start about 6 times slower than natively, and train far slower"
if is_old "$(installed_version)"; then say "$(crashes) $by_hand"; fi
