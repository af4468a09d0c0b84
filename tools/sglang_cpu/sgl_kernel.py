"""A stand-in for SGLang's package of CUDA kernels, in the environment of the part `sglang`.

On a CPU, SGLang computes in PyTorch instead. What it still uses at start-up has no effect with one process and without a GPU:

- On ARM, it calls two operators of this package. One binds threads to cores, the other prepares shared memory between processes.
- With `--enable-return-routed-experts`, it has CUDA pin the memory that holds them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_OPERATORS = torch.library.Library("sgl_kernel", "DEF")
_OPERATORS.define("init_cpu_threads_env(str cpu_ids) -> str")
_OPERATORS.impl("init_cpu_threads_env", lambda cpu_ids: "", "CompositeExplicitAutograd")
_OPERATORS.define("initialize(int size, int rank) -> ()")
_OPERATORS.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


class _Runtime:
    """The function of CUDA's runtime that pins memory. 0 means success."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        return 0


torch.cuda.cudart = lambda: _Runtime


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a kernel that can be imported but not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not installed in this environment")

    return kernel
