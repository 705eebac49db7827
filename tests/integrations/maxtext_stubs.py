"""Stands in for what MaxText imports and a run on synthetic data never calls.

That is its input pipelines (datasets, tokenizers, images), its dashboards and Google's cloud. Their
modules are empty here, installed or not, so that the trainer starts alike on every machine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

PIPELINES = (
    "PIL aiohttp clang datasets duckdb fsspec gcsfs h5py hf_xet huggingface_hub jsonlines keras "
    "latex2sympy2_extended math_verify pandas pyarrow regex sentencepiece seqio sympy tensorflow "
    "tensorflow_datasets tensorflow_text tiktoken tokenizers transformers"
)
DASHBOARDS = (
    "cloud_accelerator_diagnostics drjax google_cloud_mldiagnostics google_crc32c "
    "ml_goodput_measurement opentelemetry pathwaysutils proto tensorboard "
    "tensorboard_plugin_profile tensorboardX xprof"
)
_NAMES = frozenset((*PIPELINES.split(), *DASHBOARDS.split()))
# Other packages share this namespace: protobuf is in it.
_GOOGLE = tuple(
    f"google.{name}"
    for name in ("api", "auth", "cloud", "iam", "logging", "longrunning", "oauth2", "rpc")
)


class _Stub(types.ModuleType):
    """Has every name: classes where capitals say so, for MaxText derives from some."""

    __all__: Sequence[str] = ()
    __version__ = "2.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), dict(_CLASS)) if name[:1].isupper() else mock.MagicMock(name=name)
        setattr(self, name, made)
        return made


_CLASS = {
    "__init__": lambda self, *args, **kwargs: None,
    "__class_getitem__": classmethod(lambda cls, item: cls),
    "__getattr__": lambda self, name: mock.MagicMock(name=name),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in _NAMES or name.startswith(_GOOGLE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing runs."""


def install() -> None:
    """Before MaxText is imported, in a process that does nothing else."""
    sys.meta_path.insert(0, _Finder())
