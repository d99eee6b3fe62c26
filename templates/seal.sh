#!/bin/bash
# Last step of every stage that makes a layer: gives the files under /out the same bytes in every build.
# Byte code is compiled here, so that no container does it when it starts: in one process per package, the largest first,
# since a .pyc depends on what its process compiled before (https://github.com/python/cpython/issues/129724), and checked
# by hash, not by time. Packages contain a few files that are not valid Python (templates, tests of parsers): those are
# left without byte code.
set -Eeuo pipefail
# Files from the build context have the modes of the checkout, which depend on the umask of whoever cloned it.
[ ! -d /out/opt/trainyard ] || chmod -R u=rwX,go=rX /out/opt/trainyard
find /out -name __pycache__ -prune -exec rm -rf {} +
for site in /out/opt/{venv,gsutil}/lib/python3*/site-packages /out/opt/requirements /out/opt/trainyard; do
  [ -d "$site" ] || continue
  find "$site" -mindepth 1 -maxdepth 1 \( -type d -o -name '*.py' \) ! -name bin -print0 \
    | du -s0 --files0-from=- | sort -zrn | cut -zf2- | PYTHONHASHSEED=0 xargs -0 -n 1 -P "$(nproc)" -- \
      {{ interpreter }} -B -m compileall -q -s /out -p / --invalidation-mode unchecked-hash >/dev/null || true
done
find /out -exec touch -hd @{{ epoch }} {} +
