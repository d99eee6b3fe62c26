#!/bin/bash
# The environment without packages, and what several wheels bring (set-apart). The stages of the wheels are mounted below
# /stages: a command that a wheel with its code has is there already.
set -Eeuo pipefail
mkdir -p /out/opt
cp -a /opt/venv /out/opt/venv
rm -f /out/opt/venv/.lock
echo /opt/trainyard >"$(echo /out/opt/venv/lib/python3*/site-packages)/_trainyard.pth"
for folder in /stages/*/shared; do
  find "$folder" -type f -printf '%P\n' | while read -r file; do
    compgen -G "/stages/*/out/$file" >/dev/null \
      || install -D -m "$(stat -c %a "$folder/$file")" "$folder/$file" "/out/$file"
  done
done
seal
