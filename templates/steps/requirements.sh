#!/bin/bash
# requirements.sh INTERPRETER: install the wheels that a base with a framework lacks, whose commands get that first line.
set -Eeuo pipefail
/steps/install.sh /opt/clean/bin/python --target /out/opt/requirements
mkdir -p /out/opt/requirements/bin
find /out/opt/requirements/bin -type f -exec sed -i "1s|^#!/.*python3*.*|#!$1|" {} +
