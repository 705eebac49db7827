"""Summarizes a journal in numbers for a bug report, whether or not its daemon runs.

python -m ep_runtime_server.journal.summary FILE
"""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path
from typing import Any

from ep_runtime import files
from ep_runtime_server.journal.file import cut_bytes, whole_records


def summary(path: Path) -> dict[str, Any]:
    """Counts bytes and records, and facts and removals of each kind; shows no values.

    Raises:
        OSError: the file cannot be read.
    """
    good = records = odd = 0
    facts: dict[str, bool] = {}
    with open(files.open_regular(path), "rb") as file:
        for payload, end in whole_records(file):
            good = end
            records += 1
            try:
                key, value = json.loads(payload)
                facts[key] = value is not None
            except (ValueError, TypeError, RecursionError):
                odd += 1
        size_bytes, cut = os.fstat(file.fileno()).st_size, cut_bytes(file, good)
    kept = collections.Counter(key.partition("/")[0] for key, there in facts.items() if there)
    return {
        "file_bytes": size_bytes,
        "record_bytes": good,
        "num_records": records,
        "num_odd_records": odd,
        "cut_bytes": cut,
        "facts": dict(sorted(kept.items())),
    }


def main(words: list[str]) -> int:
    """Prints the summary of one file as JSON."""
    sys.stdout.write(json.dumps(summary(Path(words[0]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
