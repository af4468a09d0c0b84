"""Routed experts: which experts a mixture-of-experts model chose for each token, in each layer, as vLLM and SGLang report them.

Both engines report them for the prompt, from a requested token on, and for the reply except its last token, which was sampled but never an
input. Both report zeros for layers without experts. Their formats differ:

- vLLM 0.32 (`--enable-return-routed-experts`): base64 of a `.npy` file, tokens × layers × experts per token, `uint8` or `uint16`.
- SGLang 0.5 (`--enable-return-routed-experts`): base64 of `int32` numbers, without a shape.
"""

from __future__ import annotations

import asyncio
import io

import numpy as np

from turngate.engines.base import Generate
from turngate.engines.base64_field import Base64Field
from turngate.errors import EngineError
from turngate.types import SideArray

ROUTED_EXPERTS = "routed_experts"  # the name of the side data
_FLAG = "--enable-return-routed-experts"
_MAX_BYTES = 2**30  # maximum size of the routed experts in one reply
_INLINE_BYTES = 2**18  # larger replies are checked and converted in a thread
_MAX_HEADER = 4096  # maximum size of a .npy file's header, in bytes

ExpertShape = tuple[int, int]  # layers, experts per token


class RoutedExpertsReply:
    """The routed experts in the reply to one call."""

    def __init__(self, engine: str, shape: ExpertShape | None) -> None:
        self.field = Base64Field(ROUTED_EXPERTS, engine, _MAX_BYTES)
        self._engine, self._shape = engine, shape

    async def read(self, request: Generate, sampled: int) -> tuple[SideArray, ...]:
        """Return the routed experts of a complete reply with `sampled` tokens.

        Raise `EngineError` if they are missing or invalid.
        """
        if not self.field.size:
            raise EngineError(f"{self._engine} returned no routed experts; start it with {_FLAG}")
        if self.field.size > _INLINE_BYTES:
            return await asyncio.to_thread(self._convert, request, sampled)
        return self._convert(request, sampled)

    def _convert(self, request: Generate, sampled: int) -> tuple[SideArray, ...]:
        assert request.routed_experts is not None
        data, prompt = self.field.take(), len(request.prompt)
        values = self._read_file(data) if data.startswith(b"\x93NUMPY") else self._read_numbers(data)
        if self._shape is not None and values.shape[1:] != self._shape:
            raise EngineError(
                f"{self._engine} sent routed experts of shape {_format_shape(values)}, but the setting routed_experts is "
                f"{_format_shape(self._shape)}; correct the setting"
            )
        total, start = prompt + sampled - 1, request.routed_experts
        if start and len(values) == total:  # an older version, which always reports from the first token on
            values = values[start:]
        if len(values) != total - start:
            raise EngineError(
                f"{self._engine} sent routed experts ({_format_shape(values)} per token) for the wrong number of tokens: "
                f"{len(values)} instead of {total - start}"
            )
        if len(values) and not values.size:
            raise EngineError(
                f"{self._engine} sent empty routed experts (of shape {_format_shape(values)} per token); "
                "check that the model is a mixture of experts"
            )
        return (SideArray(ROUTED_EXPERTS, start - prompt, self._narrow(values)),) if len(values) else ()

    def _read_file(self, data: bytes) -> np.ndarray:
        """Read a .npy file without copying it."""
        header = io.BytesIO(data[:_MAX_HEADER])
        try:
            version = np.lib.format.read_magic(header)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(header)
            values = np.frombuffer(data, dtype, offset=header.tell())
            if is_fortran or len(shape) != 3 or dtype.kind not in "iu":
                order = "Fortran" if is_fortran else "C"
                raise ValueError(
                    f"expected a three-dimensional integer array in C order, not {dtype} of shape {shape} in {order} order"
                )
            return values.reshape(shape)
        except ValueError as error:
            raise EngineError(f"{self._engine} sent routed experts that cannot be read: {error}") from None

    def _read_numbers(self, data: bytes) -> np.ndarray:
        """Read numbers that are sent without a shape, and apply the configured shape."""
        if self._shape is None:
            raise EngineError(
                f"{self._engine} sent routed experts without their shape; set routed_experts to LAYERSxEXPERTS, such as 48x8 "
                "(48 layers, 8 experts per token)"
            )
        size = 4 * self._shape[0] * self._shape[1]
        if len(data) % size:
            raise EngineError(
                f"{self._engine} sent {len(data) // 4} routed experts, which is not a multiple of {_format_shape(self._shape)} "
                "(the setting routed_experts); correct the setting"
            )
        return np.frombuffer(data, "<i4").reshape(-1, *self._shape)

    def _narrow(self, values: np.ndarray) -> np.ndarray:
        """Convert to uint8 if all expert numbers fit, or else to uint16. An array that already has one of these types is unchanged."""
        if values.dtype in (np.uint8, np.uint16):
            return values
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= 2**16:
            raise EngineError(
                f"{self._engine} sent routed experts numbered {low} to {high}; valid numbers are 0 to {2**16 - 1}"
            )
        return values.astype(np.uint8 if high < 2**8 else np.uint16)


def _format_shape(shape: np.ndarray | ExpertShape) -> str:
    return "x".join(map(str, shape.shape[1:] if isinstance(shape, np.ndarray) else shape))
