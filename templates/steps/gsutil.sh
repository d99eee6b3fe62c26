#!/bin/bash
# gsutil.sh PYTHON: install gsutil in a separate environment, since it pins other versions than the trainers need.
set -Eeuo pipefail
uv venv --quiet --relocatable --no-project --no-config --python "$1" /out/opt/gsutil
/steps/install.sh /out/opt/gsutil/bin/python --python-platform "$WHEEL_PLATFORM"
mkdir -p /out/usr/local/bin /out/etc
ln -s /opt/gsutil/bin/gsutil /out/usr/local/bin/gsutil
# The machine's service account, from the metadata server: the credentials of jobs on Google Cloud.
printf '[GoogleCompute]\nservice_account = default\n' >/out/etc/boto.cfg
