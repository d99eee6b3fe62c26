"""Tests of what depends on the date pass on any day: each says which day it is about."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest
from tests.conftest import ROOT

#: Before the end of TensorFlow 2.21 and after it, a leap day, and a day on which no release of today is supported.
DAYS = ["2026-12-15", "2027-04-01", "2028-02-29", "2031-06-01"]

#: Files whose tests look at the date. uv does not run under libfaketime 0.9.10 ("panicked at time.rs"), and what
#: measures time fails under it, so that the others are left out.
FILES = ["audit", "goldens", "matrix", "project", "verify", "waivers"]


@pytest.mark.slow("each test, on the day on which it runs")
@pytest.mark.needs("faketime")
@pytest.mark.parametrize("day", DAYS)
def test_tests_pass_on_any_day(day: str) -> None:
    ahead = (datetime.date.fromisoformat(day) - datetime.datetime.now(tz=datetime.UTC).date()).days
    words = ["faketime", "-m", "-f", f"{ahead:+}d", sys.executable, "-m", "pytest", "-q", "-n", "0"]
    words += ["-p", "no:cacheprovider", *(f"tests/unit/test_{name}.py" for name in FILES)]
    left_out = "not test_project or checks_are or are_checked"
    found = subprocess.run([*words, "-k", left_out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
