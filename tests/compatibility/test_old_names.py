"""Documented names that have changed still import, with a warning that gives the new name."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

import pytest

from turngate import _moved


@pytest.mark.filterwarnings("ignore:.*was renamed to:DeprecationWarning")  # from the package of an old module
@pytest.mark.parametrize("name", _moved.MODULES)
def test_old_module_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{name} was renamed to {_moved.MODULES[name]}"):
        old = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    if name.startswith("turngate.environment") and not find_spec("openenv"):
        return  # its new module needs the `openenv` extra
    new = importlib.import_module(_moved.MODULES[name])
    public = [one for one in vars(new) if not one.startswith("_") and f"{name}.{one}" not in _moved.NAMES]
    assert public and all(getattr(old, one) is getattr(new, one) for one in public)


@pytest.mark.filterwarnings("ignore:.*was renamed to:DeprecationWarning")
@pytest.mark.parametrize("old", _moved.NAMES)
def test_old_name_imports(old: str) -> None:
    module, _, name = old.rpartition(".")
    new_module, _, new_name = _moved.NAMES[old].rpartition(".")
    if module.startswith("turngate.trainers.trl.rows") and not find_spec("trl"):
        return  # the module needs the `trl` extra
    imported = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} was renamed to {_moved.NAMES[old]}"):
        value = getattr(imported, name)
    assert value is getattr(importlib.import_module(new_module), new_name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="Nothing"):
        exec("from turngate.trainers.feed import Nothing")
