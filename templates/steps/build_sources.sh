#!/bin/bash
# Build wheels of the source distributions in /sources/NAME, in /built/NAME, and run code of theirs.
set -Eeuo pipefail
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
for folder in /sources/*/; do
  built=/built/$(basename "$folder")
  mkdir -p "$built"
  find "$folder" -maxdepth 1 \( -name wheels.lock -o -name pins \) -exec cp {} "$built" \;
  find "$folder" -type f ! -name '*.whl' ! -name '*.lock' ! -name pins -print0 | sort -z | while read -r -d '' archive; do
    uv build --wheel --offline --no-index --find-links "$folder" --build-constraints /locks/uv.lock \
      --no-create-gitignore --out-dir "$built" "$archive"
  done
done
