"""A journal in numbers, whole or torn, while somebody writes it."""

from __future__ import annotations

import json

from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal import summary
from ep_runtime_server.journal.file import Journal


def test_facts_are_counted_by_kind_and_told_to_nobody(tmp_path, capsys):
    path = tmp_path / "journal"
    journal = Journal(path, Failpoints())
    records = [("session/a", {"token_digest": "x"}), ("session/b", {}), ("group/g", {"job": "y"})]
    assert journal.append([*records, ("session/b", None), ("boot", "id")])
    assert summary.main([str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"] == {"boot": 1, "group": 1, "session": 1}
    assert (found["num_records"], found["num_odd_records"], found["cut_bytes"]) == (5, 0, 0)
    assert found["file_bytes"] > found["record_bytes"] == journal.size_bytes  # room ahead
    journal.close()
    path.write_bytes(path.read_bytes()[: found["record_bytes"] - 1])
    torn = summary.summary(path)
    assert (torn["num_records"], torn["cut_bytes"] > 0) == (4, True)
