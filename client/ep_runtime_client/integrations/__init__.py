"""`ep.integrations`: modules that trainers of other projects import."""

from ep_runtime_client.integrations import maxtext as maxtext

__all__ = ["maxtext"]


def __dir__() -> list[str]:
    return __all__
