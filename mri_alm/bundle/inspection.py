"""What a MONAI bundle's configs would execute, found before anything of them is: `pipelines/inspect_bundle.py`.

Files are read with MONAI's own reader and identifiers replaced with MONAI's own functions, so that what is judged is
what would be evaluated. The rules are in :mod:`mri_alm.bundle.allowed_names`.
"""

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from monai.bundle import ConfigParser
from monai.bundle.config_item import ComponentLocator
from monai.bundle.reference_resolver import ReferenceResolver

from mri_alm.bundle.allowed_names import (
    arguments_that_load,
    refusal_of_argument,
    refusal_of_import,
    refusal_of_name,
    refusals_of_expression,
)
from mri_alm.errors import InputError

CONFIGS = (".json", ".yaml", ".yml")
CODE = (".dll", ".egg", ".pth", ".py", ".pyc", ".pyd", ".pyw", ".pyz", ".so", ".whl", ".zip")
PICKLES = (".joblib", ".pickle", ".pkl")
LARGEST, MOST = 1 << 24, 200_000  # bytes of a file; values in it, aliases of YAML resolved
_SHOWN = 20


@dataclass(frozen=True)
class Finding:
    """One thing that a config would run, or that stands beside it to be run.

    Attributes:
        file: Where.
        id: MONAI's identifier in the file, such as ``train::dataset``.
        kind: ``target``, ``expression``, ``import``, ``macro``, ``argument``, ``mode`` or ``file``.
        text: What stands there.
        names: Callables that it names, as far as they are known without running it.
        problem: Why it is refused; empty if it is not.
    """

    file: str
    id: str
    kind: str
    text: str
    names: tuple[str, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        """One line; control characters of the text are escaped."""
        head = f"{'REFUSED' if self.problem else 'ok':8}{self.file}  {self.id}  {self.kind}  {self.text}"
        tail = f"  <- {self.problem}" if self.problem else ""
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in head + tail)


def inspect_bundle(place: Path) -> list[Finding]:
    """Everything that the configs in a folder, or one config file and what its macros name, would execute.

    Args:
        place: A bundle, run or config folder: all its JSON and YAML files count, and macros start there. Or a config
            file: macros then start at the working directory, as MONAI reads them.

    Raises:
        InputError: If there is no such file or folder.
    """
    if not place.exists():
        raise InputError(f"There is no {place}. Give the folder of a bundle, or one of its config files.")
    if place.is_file():
        return _Inspection(Path()).run([place])
    files = sorted(path for path in place.rglob("*") if path.is_symlink() or not path.is_dir())
    beside = [found for path in files if (found := _beside(path, place)).problem]
    configs = [path for path in files if path.suffix.lower() in CONFIGS and path.is_file() and not path.is_symlink()]
    return beside + _Inspection(place).run(configs)


def inspect_config(config: dict[str, Any], name: str) -> list[Finding]:
    """The same of a config in memory whose macros are resolved already; one that is left counts as refused.

    Args:
        config: Its content.
        name: What the findings call its file.
    """
    inspection = _Inspection(None)
    inspection.look(config, "", name)
    return inspection.findings()


def refuse(findings: list[Finding], place: Path) -> None:
    """Stop where anything is refused.

    Raises:
        InputError: With the first lines of what is.
    """
    bad = [finding for finding in findings if finding.problem]
    if bad:
        more = f"\n... and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InputError(
            f"{place} would run what is not in the allow-list; nothing was run:\n"
            + "\n".join(map(str, bad[:_SHOWN]))
            + f"{more}\nRead these lines. If you trust whoever made it, add --trust (docs/security.md)."
        )


def _beside(path: Path, root: Path) -> Finding:
    """A file of the folder: code, pickles and ways out of the folder are refused."""
    problem = ""
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        problem = "is a link out of the folder"
    elif path.is_symlink() and path.suffix.lower() in CONFIGS:
        problem = "is a config behind a link"
    elif path.suffix.lower() in CODE:
        problem = "is code: a bundle's folder is on Python's search path when it runs"
    elif path.suffix.lower() in PICKLES:
        problem = "is a pickle, which runs code when it is read"
    elif path.suffix.lower() in (".conf", ".ini", ".cfg") and path.is_file() and path.read_bytes() != _logging():
        problem = "configures logging, which evaluates it: compare it with configs/logging.conf"
    return Finding(str(path), "", "file", path.name, problem=problem)


def _logging() -> bytes:
    path = Path(__file__).parents[2] / "configs" / "logging.conf"
    return path.read_bytes() if path.is_file() else b""


@cache
def _locator() -> ComponentLocator:
    return ComponentLocator()


class _Inspection:
    """One pass over config files; ``root`` is where macros start, None where none is left."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.found: list[Finding] = []
        self.expressions: list[tuple[str, str, str]] = []
        self.aliases: dict[str, set[str]] = defaultdict(set)
        self.seen: set[Path] = set()
        self.values = 0

    def run(self, files: list[Path]) -> list[Finding]:
        for file in files:
            self._read(file)
        return self.findings()

    def findings(self) -> list[Finding]:
        """Expressions are judged last, when all imports are known."""
        for file, place, text in self.expressions:
            names, problems = refusals_of_expression(_with_references(text), self.aliases)
            problem = "; ".join(dict.fromkeys(problems))
            self.found.append(Finding(file, place, "expression", f"${text}", tuple(names), problem))
        self.expressions = []
        return self.found

    def look(self, node: Any, place: str, file: str) -> None:
        """Visit a value and all below it."""
        self.values += 1
        if self.values > MOST:
            self._add(file, place, "file", "", "holds more values than any config")
            return
        if isinstance(node, dict):
            self._component(node, place, file)
            for key, value in node.items():
                self._key(str(key), value, place, file)
                self.look(value, f"{place}::{key}".lstrip(":"), file)
        elif isinstance(node, (list, tuple)):
            for number, value in enumerate(node):
                self.look(value, f"{place}::{number}".lstrip(":"), file)
        elif isinstance(node, str) and node.startswith("$"):
            self._expression(node, place, file)
        elif isinstance(node, str) and node.startswith("%"):
            self._macro(node, place, file)

    def _add(self, file: str, place: str, kind: str, text: str, problem: str) -> None:
        self.found.append(Finding(file, place, kind, text, problem=problem))

    def _read(self, path: Path) -> None:
        if path.resolve() in self.seen:
            return
        self.seen.add(path.resolve())
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError("larger than any config")
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of a key that stands twice
                self.look(ConfigParser.load_config_file(path), "", str(path))
        except (OSError, ValueError, TypeError, UserWarning, yaml.YAMLError, RecursionError) as error:
            self._add(str(path), "", "file", path.name, f"cannot be read as a config ({type(error).__name__})")

    def _component(self, node: dict[Any, Any], place: str, file: str) -> None:
        for key, target in node.items():
            if _leaf(str(key)) != "_target_":
                continue
            names = _targets(target)
            problems = [problem for name in names if (problem := refusal_of_name(name))]
            if isinstance(target, str) and (target.startswith("%") or not (names or target.startswith(("$", "@")))):
                problems.append("the name must stand here, and exist")
            loading = {a: d for name in names if not problems for a, d in arguments_that_load(name).items()}
            loose = loading.keys() - node.keys()
            unsaid = [a for a in sorted(loose) if a.startswith("pretrained") and loading[a] is True]
            problems += [f"it downloads weights unless {a} is False" for a in unsaid]
            if node.get("_mode_", "default") != "default" and loose:
                problems.append(f"it is handed on without its {', '.join(sorted(loose))}, which names what it loads")
            shown = target if isinstance(target, str) else type(target).__name__
            self.found.append(Finding(file, place, "target", shown, names, "; ".join(problems)))

    def _key(self, key: str, value: Any, place: str, file: str) -> None:
        name, where = _leaf(key), f"{place}::{key}".lstrip(":")
        if name == "_mode_" and value not in ("default", "callable"):
            self._add(file, where, "mode", str(value), "_mode_ may only be default or callable: debug opens a debugger")
        if problem := refusal_of_argument(name, value):
            self._add(file, where, "argument", str(value), problem)

    def _expression(self, node: str, place: str, file: str) -> None:
        text = ReferenceResolver.normalize_id(node)[1:]
        try:
            first = next(iter(ast.parse(text).body), None)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            first = None
        if not isinstance(first, (ast.Import, ast.ImportFrom)):
            self.expressions.append((file, place, text))
            return
        for path, name in _imported(first):
            self.aliases[name].add(path)
            problem = refusal_of_import(path)
            self.found.append(Finding(file, place, "import", text, (path,), problem))

    def _macro(self, node: str, place: str, file: str) -> None:
        try:
            path = ConfigParser.split_path_id(ConfigParser.resolve_relative_ids(place, node)[1:])[0]
        except ValueError:
            self._add(file, place, "macro", node, "points out of the config")
            return
        if not path and self.root is not None:
            return  # another place of the same files, which are looked at anyway
        target = None if self.root is None else self.root / path
        if self.root is None or target is None:
            self._add(file, place, "macro", node, "a resolved config holds no macro")
        elif Path(path).is_absolute() or not target.resolve().is_relative_to(self.root.resolve()):
            self._add(file, place, "macro", node, "leaves the folder")
        elif not target.is_file():
            self._add(file, place, "macro", node, "names a file that is not there")
        else:
            self._add(file, place, "macro", node, "")
            self._read(target)


def _leaf(key: str) -> str:
    """The last name of a key: MONAI merges ``+a`` and reaches inside with ``a::b`` and ``a#b``."""
    return ReferenceResolver.split_id(key)[-1].lstrip("+~")


def _targets(target: Any) -> tuple[str, ...]:
    """The dotted names that a ``_target_`` stands for; a bare name is one of MONAI's, wherever it is defined."""
    if not isinstance(target, str) or target.startswith(("$", "@", "%")):
        return ()
    if "." in target:
        return (target,)
    modules = _locator().get_component_module_name(target) or ()
    return tuple(f"{module}.{target}" for module in ([modules] if isinstance(modules, str) else modules))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Dotted name and the name it is bound to; MONAI binds ``import a.b`` to a name that no expression can say."""
    for alias in node.names:
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        yield f"{'.' * getattr(node, 'level', 0)}{base}{alias.name}", alias.asname or alias.name


class _All(dict[str, Any]):
    """Holds every key: MONAI's function then replaces every reference."""

    def __contains__(self, key: object) -> bool:
        return True


def _with_references(text: str) -> str:
    return ReferenceResolver.update_refs_pattern(f"${text}", _All())[1:]
