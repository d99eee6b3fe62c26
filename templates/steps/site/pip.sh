#!/bin/sh
# What `pip` and `uv` are in an image that has neither: those that were added to it later, or else a line that says how.
name=${0##*/}
# A pip of Debian installs into the image's environment, and not into that of Debian's Python.
other=$(PATH=/usr/sbin:/usr/bin:/sbin:/bin command -v "$name") && PIP_PYTHON=/opt/venv/bin/python exec "$other" "$@"
[ "$name" = uv ] || set -- pip "$@"
words=
for word; do
  case $word in *[!A-Za-z0-9_.,=@/:+-]*) word="'$word'" ;; esac
  words="$words $word"
done
echo "$name: not in this image: use 'requirements' of trainyard.yaml, or in a Dockerfile, after 'USER root':" \
  "RUN --mount=from=ghcr.io/astral-sh/uv,source=/uv,target=/bin/uv uv --no-cache$words" >&2
exit 127
