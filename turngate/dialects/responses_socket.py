"""The WebSocket transport of OpenAI Responses: the client's events, and the frames of a reply.

Every `response.create` event is a request with the fields of `POST /v1/responses`. The frames of its reply are the events of a stream.
"""

from __future__ import annotations

import msgspec
import orjson

from turngate.dialects.openai import error_body
from turngate.dialects.responses_reply import error_message
from turngate.dialects.wire import DECODE_ERRORS, describe_error, error_field, field_error
from turngate.errors import BadRequest, TurngateError

MAX_LANES = 32  # on one connection, as in OpenAI's API
_MAX_LANE_NAME = 200
_DATA = b"\ndata: "


class EventUnsupported(BadRequest):
    """A client's event is not a model call: its type is not `response.create`."""


class SocketEvent(msgspec.Struct, frozen=True):
    """A client's event, apart from the fields that it shares with a request over HTTP."""

    type: str = ""
    stream_id: str | None = (
        None  # names a lane; calls of one lane are served one after another, those of different lanes in parallel
    )
    generate: bool | None = None  # if false, nothing is sampled: the next request can continue the response

    @property
    def lane(self) -> str:
        return self.stream_id or ""


_event = msgspec.json.Decoder(SocketEvent)


def decode_event(raw: bytes) -> SocketEvent:
    try:
        event = _event.decode(raw)
    except msgspec.ValidationError as error:
        raise BadRequest(describe_error(error), param=error_field(error)) from None
    except DECODE_ERRORS as error:
        raise BadRequest(f"The event is not valid JSON: {error}") from None
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
    """Split the events of a stream into frames. The frames of a named lane carry its name."""
    frames = [block.partition(_DATA)[2] for block in data.split(b"\n\n") if block]
    if lane:
        name = orjson.dumps(lane)
        frames = [frame[:-1] + b',"stream_id":' + name + b"}" for frame in frames]
    return [frame.decode() for frame in frames]


def encode_error_frame(error: TurngateError, status: int, lane: str = "") -> str:
    """Encode an error that ends a request before its reply starts."""
    body = error_body(error, message=error_message(error))["error"]
    frame = {
        "type": "error",
        "status": status,
        "error": body,
        # The same as in the error event of a stream, which SDKs read.
        "code": body["code"],
        "message": body["message"],
        "param": body["param"],
        "sequence_number": 0,
        **({"headers": {"retry-after": "1"}} if error.status == 429 else {}),
        **({"stream_id": lane} if lane else {}),
    }
    return orjson.dumps(frame).decode()
