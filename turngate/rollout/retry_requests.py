"""Wishes for another attempt of a rollout, as a batch reads them from its stream of events and answers them there. `batch.py` decides.

The gateway's page puts a wish into the stream (`retry`), whether or not somebody runs the batch. The answer is a `note` with the wish's
place in the stream: granted, refused, or put off. A wish without a yes or no is still to be answered, by this run or a later one.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.plan import batch_stream
from turngate.types import Json


class RetryRequest(msgspec.Struct, frozen=True):
    """Somebody wants a rollout to be tried again, after the attempt that was its last."""

    rollout: str
    attempt: int

    def granted(self) -> tuple[bool, str]:
        return True, f"it is tried again, as attempt {self.attempt + 1}"


def parse_request(event: Json) -> RetryRequest | None:
    """The wish that an event is."""
    if event["kind"] != "retry":
        return None
    try:
        return msgspec.convert(event["data"], RetryRequest)
    except msgspec.ValidationError:  # of somebody else's making
        return None


async def read_pending(gateway: GatewayClient, batch: str) -> tuple[dict[int, RetryRequest], int]:
    """The wishes that nobody has said yes or no to, by their place in the stream; and how far that was read. To read only a part would
    be to act on one that was refused."""
    found: dict[int, RetryRequest] = {}
    heard = 0
    async for event in gateway.events(batch_stream(batch), wait=False):
        heard = event["seq"]
        if (wish := parse_request(event)) is not None:
            found[heard] = wish
        elif (answered := _parse_reply(event)) is not None:
            found.pop(answered, None)
    return found, heard


async def send_reply(gateway: GatewayClient, batch: str, seq: int, taken: bool | None, message: str) -> None:
    """`taken`: None puts it off. Where the gateway cannot be told, the wish is still there, unanswered."""
    with suppress(TurngateError):
        await gateway.announce(batch_stream(batch), "note", {"retry": seq, "taken": taken, "message": message})


def _parse_reply(event: Json) -> int | None:
    """The wish that was granted or refused. What was put off is still to be answered."""
    data = event["data"] if event["kind"] == "note" else {}
    seq = data.get("retry")
    return seq if isinstance(seq, int) and isinstance(data.get("taken"), bool) else None
