#!/usr/bin/env bash
# Installs and starts a Docker engine on a Debian or Ubuntu host: one with BuildKit >= 0.12 (`COPY --link`), the
# containerd image store and zstd layers. It does nothing if an engine answers, and never changes an engine or an engine
# configuration that exists.
#
# Argument:     --check                start and install nothing: if no engine answers, say so
# Environment:  DOCKER_HOST, DOCKER_CONTEXT, DOCKER_CONFIG
#                                      as for every Docker client; a remote engine is only checked
#               TRAINYARD_SETUP        the command that runs this, for messages    [make setup]
#               TRAINYARD_SYSROOT      folder with the run/, var/run/ and etc/ of the host, for tests   [/]
#               TRAINYARD_STATE        folder for apt lists, the engine's log, undo-setup  [/var/lib/trainyard]
# Exit status:  0 an engine answers · 1 none can be installed (one line says what to do)
set -Eeuo pipefail

state=${TRAINYARD_STATE:-/var/lib/trainyard}
setup=${TRAINYARD_SETUP:-make setup}
socket=${TRAINYARD_SYSROOT:-}/var/run/docker.sock

say() { printf 'engine: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

engine_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
have() { command -v "$1" >/dev/null 2>&1; }
have_buildx() { docker buildx version >/dev/null 2>&1; }

if have docker && engine_answers; then
  have_buildx && exit 0
  die "the engine answers but 'docker buildx' is missing: install the docker-buildx plugin of your distribution"
fi

if have docker && [ -z "${DOCKER_HOST:-}" ]; then
  context=$(docker context inspect --format '{{.Name}}: {{.Endpoints.docker.Host}}' 2>&1 | tail -n 1) || true
  case $context in default:*) ;; *://* | *"not found"*) die "no engine answers in the Docker context ($context): start it, or run 'docker context use default'" ;; esac
fi
if [ -z "${DOCKER_HOST:-}" ] && [ -S "$socket" ] && [ ! -w "$socket" ]; then
  die "the engine's socket $socket is not open to $(id -un): join the group 'docker', or run this as root"
fi
install_by_hand="install Docker Engine 24 or later with buildx (docs.docker.com/engine/install), start it, and run this again"
[ -z "${DOCKER_HOST:-}" ] || die "no engine answers at DOCKER_HOST=$DOCKER_HOST: start it, or unset DOCKER_HOST"
[ "${1:-}" != --check ] || die "no Docker engine answers: run '$setup', which starts or installs one"
[ "$(uname -s)" = Linux ] && have apt-get || die "no Docker engine answers: $install_by_hand"
[ "$(id -u)" = 0 ] || die "no Docker engine answers, and installing one needs root: run 'sudo $setup' once, or $install_by_hand"

export DEBIAN_FRONTEND=noninteractive
apt_options=()

# Debian 12's own docker.io (20.10) supports neither the containerd image store nor the BuildKit that Trainyard needs.
# Debian 13's docker.io 26.1.5 runs on Debian 12's containerd, runc and libc (it wants libc6 >= 2.34), so only the engine
# comes from there, at priority 100, with a separate apt configuration: the host's is not changed.
# To be removed with the support of Debian 12.
private_apt_for_debian_12() {
  local host_uri parts=$state/apt/sources.d
  host_uri=$( (cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -nE 's#^deb (\[[^]]*\] )?([^ ]+) bookworm .*#\2#p'
               awk '/^URIs:/ {uri = $2} /^Suites:/ && / bookworm( |$)/ {print uri}' /etc/apt/sources.list.d/*.sources 2>/dev/null) | head -n 1)
  [ -n "$host_uri" ] || die "no Debian 'bookworm' source in /etc/apt to derive a 'trixie' source from: $install_by_hand"
  rm -rf "$parts"
  mkdir -p "$parts" "$state/apt/lists/partial" "$state/apt/preferences.d"
  cp /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list "$parts/" 2>/dev/null || true
  cat >"$parts/trixie.sources" <<EOF
Types: deb
URIs: $host_uri
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
EOF
  cat >"$state/apt/preferences.d/trixie" <<'EOF'
Package: *
Pin: release n=trixie
Pin-Priority: 100
EOF
  apt_options=(-o "Dir::Etc::SourceParts=$parts" -o "Dir::State::Lists=$state/apt/lists"
               -o "Dir::Etc::PreferencesParts=$state/apt/preferences.d")
}

installed() { dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p' | sort -u; }

install_engine() {
  local distribution version before written= updates='its packages' undo=$state/undo-setup
  distribution=$(. "${TRAINYARD_SYSROOT:-}/etc/os-release" && printf '%s' "${ID:-}")
  version=$(. "${TRAINYARD_SYSROOT:-}/etc/os-release" && printf '%s' "${VERSION_ID:-}")
  local packages=(docker.io docker-buildx iptables)
  have docker || packages+=(docker-cli)
  case "$distribution:$version" in
    debian:12) private_apt_for_debian_12 ;;
    debian:*) ;;
    ubuntu:*) packages=(docker.io docker-buildx iptables) ;;  # Ubuntu's docker.io carries the client
    *) die "no Docker engine answers, and ${distribution:-this system} is neither Debian nor Ubuntu: $install_by_hand" ;;
  esac
  before=$(installed)
  say "installing ${packages[*]} (this changes no package that is installed already)"
  apt-get "${apt_options[@]}" -qq update >&2 || die "apt-get update failed: correct the apt sources, then run this again"
  if [ "$distribution:$version" = debian:12 ]; then
    local pinned=()
    for package in "${packages[@]}"; do
      case $package in docker*) pinned+=("$package/trixie") ;; *) pinned+=("$package") ;; esac
    done
    packages=("${pinned[@]}")
    updates="none of those from Debian 13: for security updates, undo this and install again, or upgrade the host"
  fi
  # No engine, so no configuration of one to respect: the containerd image store is what zstd and provenance need.
  local configuration=${TRAINYARD_SYSROOT:-}/etc/docker/daemon.json
  if [ ! -e "$configuration" ]; then
    mkdir -p "${configuration%/*}"
    printf '{"features": {"containerd-snapshotter": true}}\n' >"$configuration"
    written="rm -f $configuration"
  fi
  apt-get "${apt_options[@]}" -qq -y --no-install-recommends --no-upgrade install "${packages[@]}" >&2 \
    || die "apt-get install ${packages[*]} failed (see above): $install_by_hand"
  mkdir -p "$state"
  cat >"$undo" <<EOF
# Undoes what '$setup' did on $(date +%F). Images stay in /var/lib/docker and /var/lib/containerd; the rules that dockerd
# added to the firewall (iptables) stay until the host restarts.
[ -d /run/systemd/system ] || kill "\$(cat /run/docker.pid)"
apt-get remove -y $(comm -13 <(echo "$before") <(installed) | paste -sd ' ')
$written
EOF
  say "dockerd opens the firewall for containers; apt updates $updates; 'sh $undo' removes what was installed"
}

# A host without an init system (a container, a CI machine) needs dockerd to be started directly.
start_dockerd() {
  mkdir -p "$state"
  say "starting dockerd, log in $state/dockerd.log"
  setsid nohup dockerd >"$state/dockerd.log" 2>&1 </dev/null &
}

have dockerd || install_engine
have docker || die "dockerd is installed but the 'docker' client is not: install docker-cli (or docker-ce-cli)"

if ! engine_answers; then
  if [ -d "${TRAINYARD_SYSROOT:-}/run/systemd/system" ]; then
    systemctl start docker || die "'systemctl start docker' failed: see 'journalctl -u docker'"
  else
    start_dockerd
  fi
fi
for _ in $(seq 150); do  # 2 s here on 2 cores (2026-11); a first start makes its storage
  if engine_answers; then
    have_buildx || die "the engine answers but 'docker buildx' is missing: install docker-buildx"
    say "Docker Engine $(docker version --format '{{.Server.Version}}') answers"
    exit 0
  fi
  sleep 0.2
done
die "dockerd did not answer within 30 s: see $state/dockerd.log"
