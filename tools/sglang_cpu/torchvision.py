"""A stand-in for torchvision, in the environment of the part `sglang`.

SGLang and transformers import torchvision for models that read images. The tests serve none, and torchvision's wheel needs the CUDA build
of torch. Every name here is a placeholder that can be imported and stored, but not called.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

__path__: list[str] = []
__version__ = "0"


class _Named(type):
    """Makes attributes of a placeholder, such as the members of an enumeration, placeholders too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("torchvision is not installed in this environment")


class Placeholder(metaclass=_Named):
    """Any function or class of torchvision."""


class _Submodule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(Placeholder, name)


for _path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = _Submodule(f"{__name__}.{_path}")
    _parent, _, _name = _module.__name__.rpartition(".")
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _name, _module)
