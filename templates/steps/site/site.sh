#!/bin/bash
# The environment without packages, and what several wheels bring (set_apart.py). The folders for-site of the wheels' stages
# are mounted below /stages: a file that is in a wheel's layer, such as a command whose code the wheel has, is left out.
set -Eeuo pipefail
mkdir -p /out/opt
cp -a /opt/venv /out/opt/venv
here=$(dirname "$0")
install -D -m 644 "$here/path.sh" /out/etc/profile.d/path.sh
for name in pip pip3 uv; do # no links: a program that is copied to one would be written to all
  install -D -m 755 "$here/pip.sh" "/out/usr/local/bin/$name"
done
rm -f /out/opt/venv/.lock
echo /opt/trainyard >"$(echo /out/opt/venv/lib/python3*/site-packages)/_trainyard.pth"
for folder in /stages/*/shared; do
  find "$folder" -type f -printf '%P\n' | while read -r file; do
    grep -qxF -- "$file" /stages/*/files \
      || install -D -m "$(stat -c %a "$folder/$file")" "$folder/$file" "/out/$file"
  done
done
