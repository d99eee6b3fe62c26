#!/bin/bash
# profile.sh TARGET PATH: what interactive shells read, with the name and the PATH of the image.
set -Eeuo pipefail
mkdir -p /out/etc/profile.d
sed "s|@PATH@|$2|" "$(dirname "$0")/trainyard.sh" >/out/etc/profile.d/trainyard.sh
chmod 644 /out/etc/profile.d/trainyard.sh
# Interactive shells that are not login shells read this file; Debian's prompt shows /etc/debian_chroot.
cp /etc/bash.bashrc /out/etc/bash.bashrc
echo '. /etc/profile.d/trainyard.sh' >>/out/etc/bash.bashrc
echo "$1" >/out/etc/debian_chroot
