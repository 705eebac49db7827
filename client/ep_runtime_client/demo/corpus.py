"""Real English text for the demo: the help topics that ship with Python, cut to batches."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt


def load_text() -> npt.NDArray[np.uint8]:
    """The bytes of all topics, which quote one another at length, without repeated paragraphs."""
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Quotations differ in indentation and line breaks.
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return np.frombuffer("\n\n".join(paragraphs.values()).encode(), dtype=np.uint8)


def training_batches(
    text: npt.NDArray[np.uint8], *, batch: int, seq: int, seed: int
) -> Iterator[npt.NDArray[np.int32]]:
    """Endless batches of windows at random places: [batch, seq + 1] int32, the same per seed."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(seq + 1)
    while True:
        starts = rng.integers(0, len(text) - seq, size=(batch, 1))
        yield text[starts + offsets].astype(np.int32)
