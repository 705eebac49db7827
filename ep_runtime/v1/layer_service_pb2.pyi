from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterLayersRequest(_message.Message):
    __slots__ = ("op_id", "group", "generation", "layers", "stacks", "replace")
    op_id: str
    group: str
    generation: int
    layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.LayerSpec]
    stacks: _containers.RepeatedCompositeFieldContainer[_types_pb2.LayerStackSpec]
    replace: bool
    def __init__(self, op_id: _Optional[str] = ..., group: _Optional[str] = ..., generation: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_types_pb2.LayerSpec, _Mapping]]] = ..., stacks: _Optional[_Iterable[_Union[_types_pb2.LayerStackSpec, _Mapping]]] = ..., replace: bool = ...) -> None: ...

class RegisterLayersResponse(_message.Message):
    __slots__ = ("layers", "stacks")
    layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegisteredLayer]
    stacks: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegisteredLayer]
    def __init__(self, layers: _Optional[_Iterable[_Union[_types_pb2.RegisteredLayer, _Mapping]]] = ..., stacks: _Optional[_Iterable[_Union[_types_pb2.RegisteredLayer, _Mapping]]] = ...) -> None: ...

class GetLayerRequest(_message.Message):
    __slots__ = ("group", "name")
    group: str
    name: str
    def __init__(self, group: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetLayerResponse(_message.Message):
    __slots__ = ("layer",)
    layer: _types_pb2.RegisteredLayer
    def __init__(self, layer: _Optional[_Union[_types_pb2.RegisteredLayer, _Mapping]] = ...) -> None: ...

class ListLayersRequest(_message.Message):
    __slots__ = ("group", "page_size", "page_token")
    group: str
    page_size: int
    page_token: str
    def __init__(self, group: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLayersResponse(_message.Message):
    __slots__ = ("layers", "next_page_token")
    layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegisteredLayer]
    next_page_token: str
    def __init__(self, layers: _Optional[_Iterable[_Union[_types_pb2.RegisteredLayer, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
