"""In a rehearsed slice the first host alone logs and saves; everywhere else nothing changes."""

from __future__ import annotations

import pytest

from trainers.common import rehearsal


@pytest.mark.parametrize(
    ("rehearse", "rank", "follows"),
    [("1", "2", True), ("1", "0", False), ("1", "", False), ("", "2", False), ("0", "2", False)],
)
def test_only_later_hosts_of_a_rehearsal_follow(
    monkeypatch: pytest.MonkeyPatch, rehearse: str, rank: str, follows: bool
) -> None:
    monkeypatch.setenv("LAUNCHER_REHEARSE", rehearse)
    monkeypatch.setenv("NODE_RANK", rank)
    assert rehearsal.follows() is follows
