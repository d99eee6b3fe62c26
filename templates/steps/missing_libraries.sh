#!/bin/bash
# Fail if a compiled file under /out needs a shared library that is neither in the image, mounted at /image, nor in a
# Python package. libcuda is the driver's, which the container runtime mounts.
set -Eeuo pipefail
needs=() lacks=() packages=()
while read -r file; do
  while read -r name _ path _; do
    case $name in linux-vdso* | /* | statically | libcuda.so* | libnvidia-*) continue ;; esac
    case $path in /opt/* | /out/*) continue ;; esac
    [ -e "/image$path" ] && continue
    [ -n "$(find /opt /out -name "$name" -print -quit)" ] && continue  # loaded by the framework, which is imported first
    package=$(dpkg-query --search "*/$name" 2>/dev/null | head -n 1 | cut -d: -f1) || true
    needs+=("${file##*/}") lacks+=("$name") packages+=("${package:-the Debian package of $name}")
  done < <(ldd "$file" 2>/dev/null)
done < <(find /out -type f \( -name '*.so*' -o -path '*/bin/*' \))
list() { printf '%s\n' "$@" | sort -u | paste -sd , | sed 's/,/, /g'; }
if [ -n "${needs[*]}" ]; then
  echo "error: the image lacks $(list "${lacks[@]}"), which $(list "${needs[@]}") needs: add $(list "${packages[@]}") to 'system:'" >&2
  exit 1
fi
