"""Real English text for the demo: the help topics that ship with Python, split and cut to batches.

If a distribution leaves the topics out, the sources of the standard library take their place.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

# One chunk in HELD_OUT_EVERY is held out; a chunk is long enough to hold whole windows of text.
CHUNK_BYTES = 8192
HELD_OUT_EVERY = 10

Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes.

    Attributes:
        train: [n] uint8.
        held_out: [m] uint8, no paragraph of which is in `train`.
        source: where the text is from, for people.
        entropy_nats: entropy of single bytes of the whole text: the loss of a model that only
            knows how frequent each byte is.
    """

    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    source: str
    entropy_nats: float


def load_corpus() -> Corpus:
    """Splits the Python help topics, or the standard library's sources if they are missing."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
        return split_text(texts, "Python's standard library (pydoc_data.topics is missing)")
    return split_text([topics[name] for name in sorted(topics)], "Python's help topics")


def split_text(documents: list[str], source: str) -> Corpus:
    """Joins documents, drops repeated paragraphs, and holds out every tenth chunk.

    The topics quote one another at length; a paragraph that stood on both sides of the split
    would make the held-out loss a memory test.
    """
    paragraphs: dict[str, str] = {}
    for document in documents:
        for paragraph in document.split("\n\n"):
            # Quotations differ in indentation and line breaks.
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    text = np.frombuffer("\n\n".join(paragraphs.values()).encode(), dtype=np.uint8)
    held_out = np.arange(len(text)) // CHUNK_BYTES % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    shares = np.bincount(text) / len(text)
    shares = shares[shares > 0]
    entropy = float(-(shares * np.log(shares)).sum())
    return Corpus(text[~held_out], text[held_out], source, entropy)


def training_batches(corpus: Corpus, *, batch: int, seq: int, seed: int) -> Iterator[Tokens]:
    """Endless batches of windows at random places: [batch, seq + 1] int32, the same per seed."""
    rng = np.random.default_rng(seed)
    last = len(corpus.train) - (seq + 1)
    offsets = np.arange(seq + 1)
    while True:
        starts = rng.integers(0, last + 1, size=(batch, 1))
        yield corpus.train[starts + offsets].astype(np.int32)


def held_out_batches(corpus: Corpus, *, batch: int, seq: int) -> Iterator[Tokens]:
    """Windows that cover the held-out text once, in order: [batch, seq + 1] int32.

    Windows overlap by the one byte that is only predicted from. A last batch that would be partly
    empty is left out.
    """
    windows = (len(corpus.held_out) - 1) // seq
    starts = (np.arange(windows) * seq)[:, None]
    text = corpus.held_out[starts + np.arange(seq + 1)].astype(np.int32)
    for first in range(0, windows - batch + 1, batch):
        yield text[first : first + batch]
