"""The WebSocket transport of OpenAI Responses: decode the client's events, and encode the frames of a reply.

Each `response.create` event is a request with the fields of `POST /v1/responses`. The reply consists of one frame per stream event.
"""

from __future__ import annotations

import msgspec
import orjson

from turngate.dialects.openai import error_body
from turngate.dialects.responses_reply import error_message
from turngate.dialects.wire import DECODE_ERRORS, body_error, field_error
from turngate.errors import BadRequest, TurngateError

MAX_LANES = 32  # per connection, as in OpenAI's API
_MAX_LANE_NAME = 200
_DATA = b"\ndata: "


class EventUnsupported(BadRequest):
    """A client's event is not of type `response.create`, which is the only supported type."""


class SocketEvent(msgspec.Struct, frozen=True):
    """The fields of a client's event that an HTTP request does not have."""

    type: str = ""
    stream_id: str | None = None  # name of a lane; calls of one lane run one after another, and lanes run in parallel
    generate: bool | None = None  # if false, the response stays empty; a later request can continue it

    @property
    def lane(self) -> str:
        return self.stream_id or ""


_event = msgspec.json.Decoder(SocketEvent)


def decode_event(raw: bytes) -> SocketEvent:
    try:
        event = _event.decode(raw)
    except DECODE_ERRORS as error:
        raise body_error(error, "The event") from None
    if not event.type:
        raise field_error("type", "is not specified; it must be 'response.create'")
    if event.type != "response.create":
        raise EventUnsupported(
            f"type must be 'response.create', not {event.type[:200]!r}; other events are not supported", param="type"
        )
    if len(event.lane) > _MAX_LANE_NAME:
        raise field_error("stream_id", f"must have at most {_MAX_LANE_NAME} characters")
    return event


def split_frames(data: bytes, lane: str) -> list[str]:
    """Split encoded stream events into WebSocket frames. If `lane` is not empty, add it to each frame as `stream_id`."""
    frames = [block.partition(_DATA)[2] for block in data.split(b"\n\n") if block]
    if lane:
        name = orjson.dumps(lane)
        frames = [frame[:-1] + b',"stream_id":' + name + b"}" for frame in frames]
    return [frame.decode() for frame in frames]


def encode_error_frame(error: TurngateError, status: int, lane: str = "") -> str:
    """Encode the error frame for a request that failed or was aborted."""
    body = error_body(error, message=error_message(error))["error"]
    frame = {
        "type": "error",
        "status": status,
        "error": body,
        # SDKs read these fields, which are the same as in the error event of a stream.
        "code": body["code"],
        "message": body["message"],
        "param": body["param"],
        "sequence_number": 0,
        **({"headers": {"retry-after": "1"}} if error.status == 429 else {}),
        **({"stream_id": lane} if lane else {}),
    }
    return orjson.dumps(frame).decode()
