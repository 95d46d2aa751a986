"""The part of etcd's v3 wire format that we speak, as protobuf classes made at run time.

Source of names and numbers: etcd's public API definition (api/etcdserverpb/rpc.proto, api/mvccpb/kv.proto). Building
the descriptors here, instead of shipping generated code, leaves us independent of the installed protobuf release
(generated code refuses to load under an older runtime). The descriptors live in a pool of their own, so another etcd
client in the same process does not clash with them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "etcrun.etcd"

_SCALARS = {
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}

# message -> fields as "name number type"; "[]" after the type means repeated, "?" means a member of the one oneof.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "ResponseHeader": ("cluster_id 1 uint64", "member_id 2 uint64", "revision 3 int64", "raft_term 4 uint64"),
    "KeyValue": (
        "key 1 bytes",
        "create_revision 2 int64",
        "mod_revision 3 int64",
        "version 4 int64",
        "value 5 bytes",
        "lease 6 int64",
    ),
    "Event": ("type 1 int32", "kv 2 KeyValue", "prev_kv 3 KeyValue"),
    "RangeRequest": (
        "key 1 bytes",
        "range_end 2 bytes",
        "limit 3 int64",
        "revision 4 int64",
        "serializable 7 bool",
        "keys_only 8 bool",
        "count_only 9 bool",
    ),
    "RangeResponse": ("header 1 ResponseHeader", "kvs 2 KeyValue[]", "more 3 bool", "count 4 int64"),
    "PutRequest": ("key 1 bytes", "value 2 bytes", "lease 3 int64", "prev_kv 4 bool"),
    "PutResponse": ("header 1 ResponseHeader", "prev_kv 2 KeyValue"),
    "DeleteRangeRequest": ("key 1 bytes", "range_end 2 bytes", "prev_kv 3 bool"),
    "DeleteRangeResponse": ("header 1 ResponseHeader", "deleted 2 int64", "prev_kvs 3 KeyValue[]"),
    "RequestOp": (
        "request_range 1 RangeRequest?",
        "request_put 2 PutRequest?",
        "request_delete_range 3 DeleteRangeRequest?",
    ),
    "ResponseOp": (
        "response_range 1 RangeResponse?",
        "response_put 2 PutResponse?",
        "response_delete_range 3 DeleteRangeResponse?",
    ),
    "Compare": (
        "result 1 int32",
        "target 2 int32",
        "key 3 bytes",
        "version 4 int64?",
        "create_revision 5 int64?",
        "mod_revision 6 int64?",
        "value 7 bytes?",
        "lease 8 int64?",
        "range_end 64 bytes",
    ),
    "TxnRequest": ("compare 1 Compare[]", "success 2 RequestOp[]", "failure 3 RequestOp[]"),
    "TxnResponse": ("header 1 ResponseHeader", "succeeded 2 bool", "responses 3 ResponseOp[]"),
    "CompactionRequest": ("revision 1 int64", "physical 2 bool"),
    "CompactionResponse": ("header 1 ResponseHeader",),
    "LeaseGrantRequest": ("TTL 1 int64", "ID 2 int64"),
    "LeaseGrantResponse": ("header 1 ResponseHeader", "ID 2 int64", "TTL 3 int64", "error 4 string"),
    "LeaseRevokeRequest": ("ID 1 int64",),
    "LeaseRevokeResponse": ("header 1 ResponseHeader",),
    "LeaseKeepAliveRequest": ("ID 1 int64",),
    "LeaseKeepAliveResponse": ("header 1 ResponseHeader", "ID 2 int64", "TTL 3 int64"),
    "LeaseTimeToLiveRequest": ("ID 1 int64", "keys 2 bool"),
    "LeaseTimeToLiveResponse": (
        "header 1 ResponseHeader",
        "ID 2 int64",
        "TTL 3 int64",
        "grantedTTL 4 int64",
        "keys 5 bytes[]",
    ),
    "WatchCreateRequest": (
        "key 1 bytes",
        "range_end 2 bytes",
        "start_revision 3 int64",
        "progress_notify 4 bool",
        "prev_kv 6 bool",
        "watch_id 7 int64",
        "fragment 8 bool",
    ),
    "WatchCancelRequest": ("watch_id 1 int64",),
    "WatchProgressRequest": (),
    "WatchRequest": (
        "create_request 1 WatchCreateRequest?",
        "cancel_request 2 WatchCancelRequest?",
        "progress_request 3 WatchProgressRequest?",
    ),
    "WatchResponse": (
        "header 1 ResponseHeader",
        "watch_id 2 int64",
        "created 3 bool",
        "canceled 4 bool",
        "compact_revision 5 int64",
        "cancel_reason 6 string",
        "fragment 7 bool",
        "events 11 Event[]",
    ),
    "AuthenticateRequest": ("name 1 string", "password 2 string"),
    "AuthenticateResponse": ("header 1 ResponseHeader", "token 2 string"),
    "MemberListRequest": (),
    "Member": ("ID 1 uint64", "name 2 string", "peerURLs 3 string[]", "clientURLs 4 string[]"),
    "MemberListResponse": ("header 1 ResponseHeader", "members 2 Member[]"),
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="etcrun_etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            field_name, number, kind = field.split()
            is_repeated, in_oneof = kind.endswith("[]"), kind.endswith("?")
            kind = kind.removesuffix("[]").removesuffix("?")
            label = (
                descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if is_repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
            added = message.field.add(name=field_name, number=int(number), label=label)
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
            else:
                added.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                added.type_name = f".{_PACKAGE}.{kind}"
            if in_oneof:
                if not message.oneof_decl:
                    message.oneof_decl.add(name="union")
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


MESSAGES: dict[str, Any] = _build()
"""Message name -> protobuf class."""


def message(kind: str, /, **fields: Any) -> Any:
    """A new message `kind` (etcd's own name, such as "PutRequest") with these fields."""
    return MESSAGES[kind](**fields)


def serialize(value: Any) -> bytes:
    return value.SerializeToString()


def range_end(prefix: bytes) -> bytes:
    """The first key after every key that starts with `prefix`; etcd's "\\0" (to the end) where there is none."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"
