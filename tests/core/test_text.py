"""Text of others on a terminal."""

from __future__ import annotations

import pytest

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.text import check_printable, printable

ORDERS = "a\x1b[2Jb\rc\x9b1md\u202ee\x7ff"


def test_what_prints_stays_and_the_rest_is_escaped():
    assert printable("ä 中 \U0001f600\nnext") == "ä 中 \U0001f600\nnext"
    assert printable(ORDERS) == r"a\x1b[2Jb\rc\x9b1md\u202ee\x7ff"


def test_an_argument_of_other_text_is_named():
    check_printable("labels", "", 10)
    for text in ("a\rb", "x" * 11):
        with pytest.raises(InvalidArgumentError, match="labels must be printable text of at most"):
            check_printable("labels", text, 10)
