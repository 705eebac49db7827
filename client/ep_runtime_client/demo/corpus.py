"""Real English text for the demo: the help topics that ship with Python, split and cut to batches.

Where a distribution leaves the topics out, the documentation inside this package stands in, and
`Corpus.source` says so.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

# One chunk in HELD_OUT_EVERY is held out; a chunk is long enough to hold whole windows of text.
CHUNK_BYTES = 8192
HELD_OUT_EVERY = 10
# Two held-out chunks; a model of a few thousand bytes would only learn them by heart.
MIN_TEXT_BYTES = 2 * HELD_OUT_EVERY * CHUNK_BYTES

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
    """The Python help topics, or this package's own documentation where they are missing."""
    topics = _pydoc_topics()
    if topics is not None:
        return split_text(topics, "the help topics of Python (pydoc_data.topics)")
    return split_text(
        package_documentation(),
        "the documentation inside ep_runtime (this Python has no pydoc_data.topics)",
    )


def _pydoc_topics() -> list[str] | None:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        return None
    topics: dict[str, str] = module.topics
    return [topics[name] for name in sorted(topics)]


def package_documentation() -> list[str]:
    """The sources of the installed packages, whose docstrings and comments are the documentation.

    The runtime's own come first; NumPy's, a dependency, fill up to MIN_TEXT_BYTES.
    """
    documents: list[str] = []
    for package in ("ep_runtime", "ep_runtime_client", "numpy"):
        root = Path(importlib.import_module(package).__path__[0])
        for path in sorted(root.rglob("*.py")):
            # Repeated paragraphs are dropped later; half as much again leaves enough.
            if sum(map(len, documents)) >= 1.5 * MIN_TEXT_BYTES:
                return documents
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                documents.append(path.read_text(encoding="utf-8", errors="replace"))
    return documents


def prompt(corpus: Corpus, size: int) -> bytes:
    """The start of a held-out paragraph, at most `size` bytes and cut before a word."""
    text = corpus.held_out.tobytes()
    for paragraph in text.split(b"\n\n")[1:]:
        if len(paragraph) > 2 * size and paragraph[:1].isupper():
            return paragraph[:size].rsplit(maxsplit=1)[0] + b" "
    return text[:size]


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
    chunks = [text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES)]
    held = [c for i, c in enumerate(chunks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    kept = [c for i, c in enumerate(chunks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    if not held:
        raise ValueError(
            f"the text has {len(text)} bytes, a split needs {CHUNK_BYTES * HELD_OUT_EVERY}"
        )
    return Corpus(np.concatenate(kept), np.concatenate(held), source, byte_entropy(text))


def byte_entropy(text: npt.NDArray[np.uint8]) -> float:
    """Entropy of single bytes, in nats."""
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log(shares)).sum())


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

    Windows overlap by the one byte that is only predicted from; a last batch that would be
    partly empty is left out, so at most `batch` windows go unseen.
    """
    windows = (len(corpus.held_out) - 1) // seq
    starts = (np.arange(windows) * seq)[:, None]
    text = corpus.held_out[starts + np.arange(seq + 1)].astype(np.int32)
    for first in range(0, windows - batch + 1, batch):
        yield text[first : first + batch]
