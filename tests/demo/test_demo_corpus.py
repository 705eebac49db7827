"""The demo's text: real, split without leaks, the same batches per seed."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from ep_runtime_client.demo import corpus as corpora


@pytest.fixture(scope="module")
def corpus() -> corpora.Corpus:
    return corpora.load_corpus()


def test_the_topics_are_a_few_hundred_kilobytes_of_english(corpus: corpora.Corpus) -> None:
    assert "help topics" in corpus.source
    assert len(corpus.train) > 250_000
    assert 0.08 < len(corpus.held_out) / len(corpus.train) < 0.13
    np.testing.assert_allclose(corpus.entropy_nats, 3.26, atol=0.05)


def test_no_held_out_paragraph_stands_in_the_training_text(corpus: corpora.Corpus) -> None:
    def paragraphs(text: bytes) -> list[str]:
        return [" ".join(part.split()) for part in text.decode(errors="replace").split("\n\n")]

    train = set(paragraphs(corpus.train.tobytes()))
    long = [part for part in paragraphs(corpus.held_out.tobytes()) if len(part) > 40]
    leaked = [part for part in long if part in train]
    assert len(long) > 50
    assert leaked == []


def test_without_topics_the_standard_library_takes_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    found = corpora.load_corpus()
    assert "topics is missing" in found.source
    assert len(found.train) > 250_000


def test_batches_are_windows_of_the_text_and_repeat_per_seed(corpus: corpora.Corpus) -> None:
    def first(seed: int) -> list[corpora.Tokens]:
        return [*itertools.islice(corpora.training_batches(corpus, batch=3, seq=16, seed=seed), 2)]

    one, again, other = first(1), first(1), first(2)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert one[0].shape == (3, 17)
    assert one[0][0].astype(np.uint8).tobytes() in corpus.train.tobytes()


def test_held_out_batches_predict_each_byte_once(corpus: corpora.Corpus) -> None:
    batches = [*corpora.held_out_batches(corpus, batch=4, seq=64)]
    predicted = np.concatenate(batches)[:, 1:].reshape(-1)
    np.testing.assert_array_equal(predicted, corpus.held_out[1 : len(predicted) + 1])
    assert len(corpus.held_out) - len(predicted) <= 5 * 64
