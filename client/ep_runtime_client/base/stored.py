"""Lets `jax.export` write and read our pytree classes in stored programs.

An exported program stores the structure of its arguments and results. Static values in it, such as
the layer of a plan or a recipe, are written as JSON, never pickled, so reading a program runs no
code.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh

from ep_runtime.errors import InvalidArgumentError

Class = TypeVar("Class", bound=type[Any])
_told_flax: set[type] = set()
# Key of an object's class in JSON, next to its fields.
_CLASS = "class"


def pytree(*parts: type) -> Callable[[Class], Class]:
    """Registers a named tuple, or a dataclass that is a pytree, under the name ep_runtime.NAME.

    Args:
        parts: dataclasses that appear in its static fields.
    """

    def register(cls: Class) -> Class:
        name = f"ep_runtime.{cls.__name__}"
        if issubclass(cls, tuple):
            export.register_namedtuple_serialization(cls, serialized_name=name)
            return cls
        fields = dataclasses.fields(cls)  # a dataclass, unless it is a named tuple
        static = [field.name for field in fields if field.metadata.get("static")]
        arrays = [field.name for field in fields if field.name not in static]
        classes: tuple[type[Any], ...] = (*parts, cls)
        known = {each.__name__: each for each in classes}

        def of_children(aux_data: Any, children: Sequence[Any]) -> Any:
            if isinstance(aux_data, cls):  # no leaves, as in recipes
                return aux_data
            values = (*zip(arrays, children, strict=True), *zip(static, aux_data, strict=True))
            return cls(**dict(values))

        export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=lambda aux: json.dumps(_plain(aux)).encode(),
            deserialize_auxdata=lambda text: _object(json.loads(text), known),
            from_children=of_children,
        )
        return cls

    return register


def tell_flax(cls: type) -> None:
    """Registers a dataclass with `flax.serialization`, if imported, which otherwise rejects it."""
    flax: Any = sys.modules.get("flax.serialization")
    if cls in _told_flax or not hasattr(flax, "register_serialization_state"):
        return
    _told_flax.add(cls)
    names = [field.name for field in dataclasses.fields(cls)]

    def to_state(given: Any) -> dict[str, Any]:
        return {name: flax.to_state_dict(getattr(given, name)) for name in names}

    def from_state(target: Any, state: Mapping[str, Any]) -> Any:
        restore = flax.from_state_dict
        made = {name: restore(getattr(target, name), state[name], name=name) for name in names}
        return dataclasses.replace(target, **made)

    flax.register_serialization_state(cls, to_state, from_state)


def _plain(value: Any) -> Any:
    """Returns `value` in the form that JSON stores."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mesh | AbstractMesh):
        return _plain_mesh(value)
    assert dataclasses.is_dataclass(value), f"{type(value).__name__} has no form in JSON"
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {_CLASS: type(value).__name__, **fields}


def _object(value: Any, known: Mapping[str, type]) -> Any:
    """Returns the object that `_plain` was given, with tuples for lists.

    Raises:
        InvalidArgumentError: a version whose classes have other fields wrote it.
    """
    if isinstance(value, list):
        return tuple(_object(each, known) for each in value)
    if not isinstance(value, dict):
        return value
    name = value[_CLASS]
    fields = {key: _object(each, known) for key, each in value.items() if key != _CLASS}
    if name == Mesh.__name__:
        return _mesh(**fields)
    try:
        return known[name](**fields)
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"the stored program has a {name} with the fields {sorted(fields)}, which this version "
            f"of ep-runtime does not know: {error}; export it again",
            argument="program",
        ) from None


def _plain_mesh(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    devices = [*mesh.devices.flat] if isinstance(mesh, Mesh) else []
    return {
        _CLASS: Mesh.__name__,
        "axes": [[name, size] for name, size in mesh.shape.items()],
        "types": [kind.name for kind in mesh.axis_types],
        "platform": devices[0].platform if devices else None,
        "devices": [device.id for device in devices],
    }


def _mesh(
    axes: Iterable[tuple[str, int]],
    types: Iterable[str],
    platform: str | None,
    devices: Sequence[int],
) -> Mesh | AbstractMesh:
    """Makes a mesh of the same devices; an AbstractMesh if this process lacks one of them."""
    names, sizes = zip(*axes, strict=True)
    kinds = tuple(AxisType[each] for each in types)
    try:
        here = {} if platform is None else {each.id: each for each in jax.devices(platform)}
    except RuntimeError:
        here = {}
    if not devices or not {*devices} <= {*here}:
        return AbstractMesh(sizes, names, axis_types=kinds)
    found = np.array([here[each] for each in devices]).reshape(sizes)
    return Mesh(found, names, axis_types=kinds)
