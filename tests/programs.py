"""Programs as modules, for tests that call them in this process."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any


def load_program(name: str) -> ModuleType:
    """``mri_alm/programs/NAME.py``; or a script by its path in the repository, imported anew without being run."""
    if "/" not in name:
        return importlib.import_module(f"mri_alm.programs.{name}")
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)
