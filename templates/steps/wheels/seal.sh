#!/bin/bash
# Last step of every stage that makes a layer: gives the files under /out the same bytes in every build.
# Byte code is compiled here, so that no container does it when it starts, and is checked by hash, not by time. A .pyc
# depends on what its process compiled before (https://github.com/python/cpython/issues/129724): each process compiles the
# next 100 files in the order of their names, whatever the number of cores. Packages contain a few files that are not
# valid Python (templates, tests of parsers): those are left without byte code.
set -Eeuo pipefail
# Files from the build context have the modes of the checkout, which depend on the umask of whoever cloned it.
[ ! -d /out/opt/trainyard ] || chmod -R u=rwX,go=rX /out/opt/trainyard
find /out -name __pycache__ -prune -exec rm -rf {} +
# compile FOLDER PYTHON...: the byte code of the modules in a folder
compile() {
  find "$1" -path "$1/bin" -prune -o -name '*.py' -print0 | LC_ALL=C sort -z \
    | PYTHONHASHSEED=0 xargs -0 -r -n 100 -P "$(nproc)" -- "${@:2}" -B -m compileall -q -s /out -p / \
      --invalidation-mode unchecked-hash >/dev/null || true
}
for site in /out/opt/{venv,gsutil}/lib/python3*/site-packages /out/opt/requirements /out/opt/trainyard; do
  [ ! -d "$site" ] || compile "$site" "${PYTHON:-/usr/bin/python3}"
done
# Layers that images on all bases share have the byte code of each base's Python.
for root in /pythons/*/; do
  [ -d "$root" ] || continue
  mkdir -p "$root/out/opt"
  cp -a /out/opt/trainyard "$root/out/opt/"
  compile /out/opt/trainyard chroot "$root" python3
  cp -a "$root/out/opt/trainyard" /out/opt/
done
find /out -exec touch -hd @315532800 {} +
