#!/bin/bash
# apt.sh PACKAGE...: install packages of the Debian archive as `install_packages` and `settle` do, which other programs
# use by sourcing this file. Versions are not pinned: the archive keeps only the newest, a pin would break within weeks.
set -Eeuo pipefail
# SOURCE_DATE_EPOCH: useradd, which packages call too, writes the day into /etc/shadow, and takes it from there.
export DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH=315532800

install_packages() {
  touch /tmp/before
  apt-get -qq -o Acquire::Languages=none update
  apt-get -qq install -y --no-install-recommends "$@"
}

# Removes what differs between builds: lists, caches and logs of the package manager, and times. The builder mounts three
# files of /etc and this program read-only, and may write the former anew during the step: touch would fail.
settle() {
  rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig
  rm -rf /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/log/apt /var/log/*.log /etc/*- /root/.cache
  find / -xdev -newer /tmp/before ! -path '/proc/*' ! -path '/sys/*' ! -path '/dev/*' ! -path '/tmp/*.sh' \
    ! -path /etc/hosts ! -path /etc/hostname ! -path /etc/resolv.conf -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
  rm -f /tmp/before
  touch -hd "@$SOURCE_DATE_EPOCH" /tmp
}

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
  install_packages "$@"
  settle
fi
