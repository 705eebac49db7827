"""A daemon's identity, which it sends to other nodes and the journal keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class NodeIdentity:
    """A daemon's description of itself; see node_service.proto."""

    node: str
    node_id: str = ""
    incarnation: str = ""
    boot_id: str = ""
    host_name: str = ""
    uid: int = 0
    pid: int = 0
    address: str = ""
    server_version: str = ""
    api_versions: tuple[str, ...] = ()


def identity_of_fact(node: str, fields: Mapping[str, Any]) -> NodeIdentity:
    known = {field.name for field in dataclasses.fields(NodeIdentity)} - {"node"}
    taken = {key: value for key, value in fields.items() if key in known}
    taken["api_versions"] = tuple(taken.get("api_versions", ()))
    return NodeIdentity(node, **taken)


def fact_of_identity(identity: NodeIdentity) -> dict[str, Any]:
    fields = dataclasses.asdict(identity)
    del fields["node"]
    return {**fields, "api_versions": list(identity.api_versions)}


def is_identity(fields: Any) -> bool:
    """Returns whether a journal's value has the form that `fact_of_identity` writes."""
    if not isinstance(fields, dict):
        return False
    wanted = fact_of_identity(NodeIdentity(""))
    versions = fields.get("api_versions", [])
    return (
        all(isinstance(fields[name], type(wanted[name])) for name in wanted.keys() & fields.keys())
        and all(isinstance(version, str) for version in versions)
        and 0 <= fields.get("uid", 0) < 1 << 32
        and abs(fields.get("pid", 0)) < 1 << 63
    )
