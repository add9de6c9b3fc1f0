"""A package's public names, each loaded from its module when it is first used (PEP 562)."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def faces(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package assigns to its ``__getattr__``, ``__dir__`` and ``__all__``.

    Torch and MONAI take seconds to import; a program that reads DICOM needs neither. So a package names what it offers
    without importing it.

    Args:
        package: Its name.
        homes: Module (relative to the package; ``""`` for modules themselves) to the names it holds.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load, lambda: sorted(modules), sorted(modules)
