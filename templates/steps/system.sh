#!/bin/bash
# system.sh [--python BASE VERSION] PACKAGE...: install packages, and add the user `trainer` and /workspace.
# --python: the version that Python must have, that of a base by this name; without it, the base holds a framework.
set -Eeuo pipefail
. /tmp/apt.sh
base='' version=''
if [ "$1" = --python ]; then
  base=$2 version=$3
  shift 3
fi
install_packages "$@"
getent group 1000 >/dev/null || groupadd --gid 1000 trainer
getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --groups 0 --create-home --shell /bin/bash trainer
[ -n "$base" ] || install -d --owner=1000 --group=0 /home/trainer
# A home directory for any uid in group 0: some clusters run containers with arbitrary uids.
chmod -R g=u /home/trainer
chgrp -R 0 /home/trainer
# Where users' code is copied to or mounted. The builder has made it if it is the working directory.
install -d --owner=1000 --group=0 --mode=775 /workspace
touch -hd "@$SOURCE_DATE_EPOCH" / /workspace
if [ -n "$base" ]; then
  installed=$(python3 -c 'import sys; print("{0}.{1}".format(*sys.version_info))')
  if [ "$installed" != "$version" ]; then
    echo "error: this base has Python $installed, and $base has $version" >&2
    exit 1
  fi
  # A compiled Python has pip, which is in no lock, and no byte code.
  rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip*
  # The byte code that Debian's scripts compile depends on times; checked by hash, it depends on the sources alone.
  library=$(python3 -c 'import sys; print(sys.prefix)')/lib
  find "$library"/python3* -name __pycache__ -prune -exec rm -rf {} +
  python3 -B -m compileall -q --invalidation-mode unchecked-hash "$library"/python3*
fi
settle
