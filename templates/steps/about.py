#!/usr/bin/python3
"""Write /opt/trainyard/image.json, which comes on standard input, for the layer under /out.

With the argument --versions, a base holds the framework, and its packages' versions are those that this Python has;
`make verify` compares them with trainyard.lock. Python 3.8 and newer.
"""

import json
import os
import sys
from importlib.metadata import version

ROOT = "/out/opt/trainyard"

about = json.load(sys.stdin)
if "--versions" in sys.argv:
    about["versions"] = {name: version(name) for name in about["versions"]}
os.makedirs(ROOT, exist_ok=True)
with open(f"{ROOT}/image.json", "w", encoding="utf-8") as file:
    file.write(json.dumps(about, indent=2) + "\n")
