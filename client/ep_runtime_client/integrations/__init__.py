"""`ep.integrations`: modules for trainers of other projects."""

from ep_runtime_client.integrations import maxtext as maxtext

__all__ = ["maxtext"]


def __dir__() -> list[str]:
    return __all__
