"""The rules of `make verify`: what must hold for an image to be what its tag says."""

# Each module enters its rules into the book: this is the order in which they are told.
# isort: off
from scripts.rules import claims as claims
from scripts.rules import builds as builds
from scripts.rules import contents as contents

# isort: on
from scripts.rules.book import RULES as RULES
from scripts.rules.book import SHOWN as SHOWN
from scripts.rules.book import applicable as applicable
from scripts.rules.book import check as check
from scripts.rules.book import title as title
from scripts.rules.contents import heaviest as heaviest
from scripts.rules.evidence import Evidence as Evidence
from scripts.rules.evidence import Inside as Inside
from scripts.rules.evidence import Package as Package
