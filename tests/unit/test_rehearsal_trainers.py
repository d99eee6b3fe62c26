"""In a rehearsed slice only the first host logs and saves."""

from __future__ import annotations

import pytest
from trainers.common import exits


@pytest.mark.parametrize(
    ("rehearse", "rank", "follows"),
    [("1", "2", True), ("1", "0", False), ("1", "", False), ("", "2", False), ("0", "2", False)],
)
def test_all_hosts_of_a_rehearsal_but_the_first_follow(
    monkeypatch: pytest.MonkeyPatch, rehearse: str, rank: str, follows: bool
) -> None:
    monkeypatch.setenv("LAUNCHER_REHEARSE", rehearse)
    monkeypatch.setenv("NODE_RANK", rank)
    assert exits.follows() is follows
