# For interactive shells: the image's PATH, which /etc/profile resets, and a line about the image and the device.
# Debian's prompt takes the name of the image from /etc/debian_chroot.
export PATH=@PATH@
case $- in *i*) ;; *) return 0 ;; esac
if [ -z "${TRAINYARD_GREETED:-}" ]; then
  export TRAINYARD_GREETED=1
  LAUNCHER_TPU_ATTEMPTS=1 LAUNCHER_HTTP_TIMEOUT=2 \
    python3 -I -S /opt/trainyard/launcher --print-env --json 2>/dev/null | python3 -I -S -c '
import json, sys
with open("/opt/trainyard/image.json", encoding="utf-8") as file:
    about = json.load(file)
versions = ", ".join(" ".join(pair) for pair in about["versions"].items())
try:
    found = json.load(sys.stdin)
    device = "{runtime}: {why}".format(**found)
except ValueError:
    device = "device unknown: run launch --explain"
print("{}: {}; {}".format(about["target"], versions, device))
'
fi
