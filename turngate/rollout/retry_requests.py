"""Read the retry requests in a batch's event stream, and write the replies to the same stream.

For each request, the gateway's web UI adds a `retry` event to the stream, whether or not the batch is running. The reply is a `note` event.
It contains the request's position in the stream and says whether the request is accepted, rejected or postponed. A request that is neither
accepted nor rejected stays open until this run of the batch or a later one decides on it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.plan import batch_stream
from turngate.store.events import GatewayEvent


class RetryReply(NamedTuple):
    """The reply to a retry request: accepted, rejected or postponed, with a message."""

    taken: bool | None  # whether the request is accepted; None if postponed
    message: str


class RetryRequest(msgspec.Struct, frozen=True):
    """A request to run a rollout again. It names the rollout's last attempt."""

    rollout: str
    attempt: int  # number of the last attempt

    def accept(self) -> RetryReply:
        """Return the reply that accepts the request."""
        return RetryReply(True, f"the rollout will be retried as attempt {self.attempt + 1}")


def parse_request(event: GatewayEvent) -> RetryRequest | None:
    """Return the retry request in an event, or None if the event is not a valid retry request."""
    if event.kind != "retry":
        return None
    try:
        return msgspec.convert(event.data, RetryRequest)
    except msgspec.ValidationError:  # not a valid request
        return None


async def read_pending(gateway: GatewayClient, batch: str) -> tuple[dict[int, RetryRequest], int]:
    """Return the open requests by their position in the stream, and the position of the last event.

    The whole stream is read, because a request is open only if no later event is a reply that decides on it.
    """
    pending: dict[int, RetryRequest] = {}
    last = 0
    async for event in gateway.events(batch_stream(batch), wait=False):
        last = event.seq
        if (request := parse_request(event)) is not None:
            pending[last] = request
        elif (answered := _parse_reply(event)) is not None:
            pending.pop(answered, None)
    return pending, last


async def send_reply(gateway: GatewayClient, batch: str, seq: int, reply: RetryReply) -> None:
    """Reply to a request. If this fails, ignore the error: the request stays open."""
    with suppress(TurngateError):
        data = {"retry": seq, "taken": reply.taken, "message": reply.message}
        await gateway.announce(batch_stream(batch), "note", data)


def _parse_reply(event: GatewayEvent) -> int | None:
    """Return the position of the request that an event accepts or rejects. Return None if it does neither."""
    data = event.data if event.kind == "note" else {}
    seq = data.get("retry")
    return seq if isinstance(seq, int) and isinstance(data.get("taken"), bool) else None
