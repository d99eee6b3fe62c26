#!/bin/bash
# Last step of every stage that makes a layer: what lies under /out becomes the same bytes in every build.
# Byte code is compiled here, so that no container does it at its start: one process a package, since a .pyc depends on
# what its process compiled before (python/cpython#129724), the largest first; checked by hash, never by time.
# Packages carry a few files that are no valid Python (templates, tests of parsers): those are left as they are.
set -Eeuo pipefail
find /out -name __pycache__ -prune -exec rm -rf {} +
for site in /out/opt/{venv,gsutil}/lib/python3*/site-packages /out/opt/requirements /out/opt/trainyard; do
  [ -d "$site" ] || continue
  find "$site" -mindepth 1 -maxdepth 1 \( -type d -o -name '*.py' \) ! -name bin -print0 \
    | du -s0 --files0-from=- | sort -zrn | cut -zf2- | PYTHONHASHSEED=0 xargs -0 -n 1 -P "$(nproc)" -- \
      {{ interpreter }} -B -m compileall -q -s /out -p / --invalidation-mode unchecked-hash >/dev/null || true
done
find /out -exec touch -hd @{{ epoch }} {} +
