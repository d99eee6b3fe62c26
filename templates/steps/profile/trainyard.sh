# For interactive shells: the image's PATH, which /etc/profile resets, and a line about the image and the device.
# Debian's prompt takes the name of the image from /etc/debian_chroot.
export PATH=@PATH@
case $- in *i*) ;; *) return 0 ;; esac
if [ -z "${TRAINYARD_GREETED:-}" ]; then
  export TRAINYARD_GREETED=1
  LAUNCHER_TPU_ATTEMPTS=1 LAUNCHER_HTTP_TIMEOUT=2 \
    python3 -I -S /opt/trainyard/launcher --print-env --json 2>/dev/null | python3 -I -S -c '
import json, sys
with open("/opt/trainyard/recipe.json", encoding="utf-8") as file:
    recipe = json.load(file)
framework = recipe["framework"]
versions = {name.replace("-", "_"): version for name, version in framework["packages"].items()}
versions[framework["name"]] = framework["version"]
shown = ", ".join(" ".join(pair) for pair in versions.items())
try:
    found = json.load(sys.stdin)
    device = "{runtime}: {why}".format(**found)
except ValueError:
    device = "device unknown: run launch --explain"
print("{}: {}; {}".format(recipe["name"], shown, device))
'
fi
