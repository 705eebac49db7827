"""Makes one group for all models, and loads the page's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fakes
import models
import pytest
import random_block


@pytest.fixture(scope="session")
def group() -> Iterator[fakes.LocalGroup]:
    made = fakes.local_group(
        {"ep": 2},
        transport="memfd",
        num_experts=random_block.EXPERTS,
        hidden_size=random_block.HIDDEN,
        max_tokens_per_rank=random_block.TOKENS // 2,
        max_top_k=8,
        max_token_dtype="float32",
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def functions() -> dict[str, Callable[..., Any]]:
    return models.functions_of_the_page()
