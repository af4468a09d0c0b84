"""Verify detects sampling masks that do not match their tokens, and rows with another temperature than the recorded one."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from tests import kit
from tests.exact.agent import World
from tests.exact.side_engine import SideEngine
from tests.verify.kit import Tampering, run_verify, tampering, wrong
from turngate.engines.base import Chunk, Generate
from turngate.trace.sample import Sample
from turngate.trace.side_data import decode_values, encode_values
from turngate.types import RaggedArray, SideArray
from turngate.verify.store_reader import SideFacts
from turngate.views.session import open_row_source


class Masking(SideEngine):
    """An engine whose calls report sampling masks: the sampled id alone, or the sampled id and the next one."""

    def _add_side_data(self, request: Generate, call: int, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        return _add_masks(chunks)


async def _add_masks(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    first = 0
    async for chunk in chunks:
        masks = [[token] if at == 0 else [token, token + 1] for at, token in enumerate(chunk.ids)]
        logprobs = [0.0 if len(mask) == 1 else -0.7 for mask in masks]
        side = (SideArray("sampling_mask", first, RaggedArray.from_lists(masks)),) if masks else ()
        first += len(masks)
        yield msgspec.structs.replace(chunk, logprobs=logprobs, side=side)


async def record(folder: Path) -> str:
    async with World.of(folder, kit.renderer(), engine=Masking) as world:
        agent = world.agent(sampling={"top_p": 0.5})
        agent.messages = [kit.user("Begin.")]
        await agent.call(kit.say("One."))
        return agent.session_id


def rewrite_masks(t: Tampering, change: Callable[[list[list[int]]], list[list[int]]]) -> None:
    """Change the masks of the turn, and correct the checksum."""
    [node] = t.of_kind("sampled")
    query = "SELECT node, name, first, dtype, shape, data FROM side_data WHERE session=? AND node=?"
    [(*place, data)] = t._db.execute(query, (t.key, node)).fetchall()
    values = decode_values(data, "int32", (-1,))
    assert isinstance(values, RaggedArray)
    new = bytes(encode_values(RaggedArray.from_lists(change([each.tolist() for each in values.lists()]))))
    checksum = zlib.crc32("/".join(map(str, place)).encode() + new)
    t.sql("UPDATE side_data SET data=?, checksum=? WHERE session=? AND node=?", new, checksum, t.key, node)


def test_turn_with_masks_passes_and_is_trained(recorded: tuple[Path, str]) -> None:
    found = run_verify(*recorded)
    assert found.ok and "sampling masks" in [f.check for f in found.findings], found
    with open_row_source(recorded[0]) as rows:
        [row] = rows(recorded[1], False)
    assert row.mask.any() and "sampling_mask" in row.side


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda masks: [[token + 5 for token in each] for each in masks], "is not in its sampling mask"),
        (lambda masks: [masks[0], [*masks[1], masks[1][0]], *masks[2:]], "has repeated or negative ids"),
        (lambda masks: [masks[0], masks[1][:1], *masks[2:]], "has no other ids, but its log-probability is -0.7"),
    ],
)
def test_altered_masks_are_found(
    copy: tuple[Path, str], change: Callable[[list[list[int]]], list[list[int]]], why: str
) -> None:
    with tampering(*copy) as t:
        rewrite_masks(t, change)
    found = run_verify(*copy)
    assert "sampling masks" in wrong(found) and why in str(found.wrong), found.wrong


def test_huge_number_of_masks_is_reported(copy: tuple[Path, str]) -> None:
    """A damaged turn may list more masks than memory can hold."""
    with tampering(*copy) as t:
        [node] = t.of_kind("sampled")
        t.facts(node, side=(SideFacts("sampling_mask", 0, 2**60, "int32", (-1,)),))
    assert "side data" in wrong(run_verify(*copy))


def test_row_with_another_temperature_is_found(recorded: tuple[Path, str]) -> None:
    def heat(row: Sample) -> Sample:
        spans = tuple(msgspec.structs.replace(span, temperature=0.5) for span in row.spans)
        return msgspec.structs.replace(row, spans=spans)

    found = run_verify(*recorded, heat)
    assert wrong(found) == {"rows"} and "temperature 0.5, but the recorded temperature is 1.0" in str(found.wrong)
