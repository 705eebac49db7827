"""The lint of sentences finds each kind of bad English, and passes what replaces it."""

from __future__ import annotations

import pytest
from tools.plain_english import MAX_WORDS, RULES, faults, messages

# One bad sentence for each rule, in their order, and the sentence to write instead.
EXAMPLES = [
    ("A label that is no text fails.", "There is no label; a row is no longer read."),
    ("A lossy dtype is said once.", "The call warns once about a lossy dtype."),
    ("It is told once.", "The daemon reports it once."),
    ("The batch lies over all devices.", "The batch is sharded over all devices."),
    ("Who claims again has unmapped it.", "Who waits for a rank?"),
    ("Of the layers that are registered.", "Names of the registered layers."),
    ("The sizes of what they exchange.", "The sizes of the rows that they exchange."),
    ("Where a step hangs, `top` helps.", "`top` names the rank where a step hangs."),
    ("A daemon starts where none runs.", "A daemon starts if none runs."),
    ("Rows have no gradient but for these.", "Rows have no gradient except these."),
    ("Each is traced by itself.", "Each is traced separately."),
    ("The rank for whom all wait.", "The rank that all wait for."),
    ("Copies run beside matmuls.", "Copies overlap matmuls."),
    ("A twin on stock collectives.", "A twin on the collectives of plain JAX."),
    ("The group is still forming...", "Pass `[...]`, an array [..., K]."),
    ("word " * (MAX_WORDS + 1), "word " * (MAX_WORDS - 1) + "end. " + "Word " * MAX_WORDS),
]


@pytest.mark.parametrize(("rule", "example"), list(zip([*RULES, "words"], EXAMPLES, strict=True)))
def test_finds_a_bad_sentence_and_passes_the_better_one(
    rule: str, example: tuple[str, str]
) -> None:
    page = "# What heads a section\n\n```\nThis code is no text.\n```\n- A first item.\n- {}\n"
    bad, good = (list(faults(page.format(text))) for text in example)
    assert [line for line, _, _ in bad] == [6], rule
    assert good == [], rule


def test_reads_the_clauses_of_errors_and_log_calls() -> None:
    source = """
raise _refused(f"{name} is no text; who sent it knows", "its" + " job is no job")
_log.warning("group %r: stays beside others")
raise PeerLostError("one") from cause
note("is no error")
"""
    found = [(line, bad) for line, text in messages(source) for _, bad, _ in faults(text)]
    assert {line for line, _ in found} == {2, 3}
    assert {text.split()[0] for _, text in found} == {"`Code`", "Who", "Its", "Stays"}
