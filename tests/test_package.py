"""The package's front door: names of DESIGN section 8 mean the same whatever was imported before."""

import importlib
import pkgutil
import types

import pytest

import fp8lab


def test_public_names_are_never_hidden_by_modules():
    modules = [m.name for m in pkgutil.iter_modules(fp8lab.__path__) if m.name != "__main__"]
    for name in modules:
        importlib.import_module(f"fp8lab.{name}")
    for name in fp8lab.__all__:
        assert not isinstance(getattr(fp8lab, name), types.ModuleType), name
    assert set(fp8lab.__all__) - {"__version__"} <= set(dir(fp8lab))


def test_unknown_names_say_what_there_is():
    with pytest.raises(AttributeError, match="no attribute 'nope'; it has .*Trainer"):
        _ = fp8lab.nope
