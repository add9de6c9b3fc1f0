"""What a MONAI bundle's configs would execute, found before anything of them is: `pipelines/inspect_bundle.py`.

Files are read with MONAI's own reader and identifiers replaced with MONAI's own functions, so that what is judged is
what would be evaluated. Everything is refused but what ``inspection_rules.json`` lists. A dotted name is looked up in
the installed packages that it allows, and the object found must itself be defined in an allowed place:
``torch.nn.modules.module.os.system`` starts in one and ends in ``posix``. docs/security.md says what this cannot see.
"""

import ast
import json
import pkgutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from inspect import isroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from monai.bundle import ConfigParser
from monai.bundle.config_item import ComponentLocator
from monai.bundle.reference_resolver import ReferenceResolver

from mri_alm.errors import InputError

RULES: dict[str, Any] = json.loads(Path(__file__).with_name("inspection_rules.json").read_text("utf-8"))
REFERENCES = "__local_refs"  # what MONAI puts in place of "@id" before it evaluates
DEFAULTS = ("monai", "torch", "mri_alm", "ignite", "os")
Aliases = Mapping[str, Iterable[str]]

_STRUCTURE = (
    ast.Expression, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Slice, ast.Starred, ast.expr_context, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def _within(path: str, places: Iterable[str]) -> str:
    return next((place for place in places if path == place or path.startswith(f"{place}.")), "")


@cache
def refusal_of_name(path: str) -> str:
    """Why a dotted name such as ``torch.optim.Adam`` may not be used; empty if it may."""
    parts = path.split(".")
    if path in RULES["names"]:
        return ""
    if not all(part.isidentifier() for part in parts) or any(part.startswith("_") for part in parts):
        return f"{path!r} is private or no name"
    if parts[0] not in RULES["resolvable"]:
        return f"{path} is not in the allow-list"
    try:
        return _refusal_of_object(path, pkgutil.resolve_name(path))
    except Exception as error:  # whatever importing a missing optional package raises
        return f"{path} does not exist ({type(error).__name__})"


def _refusal_of_object(path: str, found: Any) -> str:
    """Where an object is defined counts, not by which way it was reached."""
    if isinstance(found, (str, int, float, Enum)):
        return ""
    bound = not isinstance(getattr(found, "__self__", None), (type, ModuleType, type(None)))  # a method of some object
    if bound or isinstance(found, ModuleType) or not (isinstance(found, type) or isroutine(found)):
        return f"{path} is no class or function"
    place = f"{getattr(found, '__module__', None)}.{found.__qualname__}"
    shown = path if place == path else f"{path} ({place})"
    if refused := _within(place, RULES["refused"]):
        return f"{shown} {RULES['refused'][refused]}"
    private = any(part.startswith("_") for part in place.split("."))
    allowed = place in RULES["names"] or _within(place, RULES["packages"])
    return "" if allowed and not private else f"{shown} is not in the allow-list"


@cache
def refusal_of_import(path: str) -> str:
    """Why a module may not be imported; those may that hold an allowed name, or are allowed as a whole."""
    if any(_within(allowed, [path]) for allowed in (*RULES["packages"], *RULES["names"])):
        return ""
    return refusal_of_name(path)


@cache
def arguments_that_load(path: str) -> Mapping[str, Any]:
    """Arguments of an allowed callable that name code or weights to load, with their defaults.

    It may only be a ``_target_``, which names arguments.
    """
    try:
        parameters = signature(pkgutil.resolve_name(path)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}
    return {name: parameters[name].default for name in RULES["by_keyword"] if name in parameters}


def refusal_of_argument(name: str, value: Any) -> str:
    """Why an argument may not have a value; empty for all that nothing is known against."""
    if name not in RULES["arguments"]:
        return ""
    allowed, values = RULES["arguments"][name], value if isinstance(value, (list, tuple)) else [value]
    fine = all(any(v is a or (isinstance(a, str) and v == a) for a in allowed) for v in values)
    return "" if fine else f"{name} may only be {', '.join(map(str, allowed))}"


def refusals_of_expression(text: str, aliases: Aliases) -> tuple[list[str], list[str]]:
    """Names that an expression uses, and why it may not be evaluated.

    Args:
        text: The expression, ``@id`` already replaced as MONAI does.
        aliases: What imports of the config bind, name to the dotted names it may stand for.
    """
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], ["it is no expression that can be read"]
    reader = _Expression({name: [name] for name in DEFAULTS} | dict(aliases))
    try:
        reader.visit(tree)
    except RecursionError:
        return [], ["it is nested too deeply"]
    return reader.names, reader.problems


class _Expression(ast.NodeVisitor):
    """Collects names and problems; every kind of node that is not named here is refused."""

    def __init__(self, aliases: Aliases) -> None:
        self.aliases = aliases
        self.names: list[str] = []
        self.problems: list[str] = []

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, _STRUCTURE):
            self.problems.append(f"{type(node).__name__.lower()} is not allowed")
            return
        super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bytes) or (isinstance(node.value, str) and "__" in node.value):
            self.problems.append("it holds a text with two underscores, or bytes")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        reference = isinstance(node.value, ast.Name) and node.value.id == REFERENCES
        if not (reference and isinstance(node.slice, ast.Constant)):
            self.visit(node.value)
            self.visit(node.slice)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        if node.args and not isinstance(node.func, (ast.Name, ast.Attribute)):
            self.problems.append("what stands behind a reference is called with arguments that have no name")
        for value in node.args:
            self.visit(value)
        for keyword in node.keywords:
            self._keyword(keyword)

    def _keyword(self, keyword: ast.keyword) -> None:
        if keyword.arg is None:
            self.problems.append("arguments are unpacked with **")
        elif keyword.arg in RULES["arguments"]:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else keyword
            if problem := refusal_of_argument(keyword.arg, value):
                self.problems.append(problem)
        self.visit(keyword.value)

    def _attribute(self, node: ast.Attribute) -> None:
        """A dotted name from an import on, or an attribute of a value that only exists at run time."""
        parts, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            parts, base = [base.attr, *parts], base.value
        if isinstance(base, ast.Name) and base.id in self.aliases:
            self._use(".".join([base.id, *parts]))
            return
        self.problems += [f"attribute {part} is not in the allow-list" for part in parts if part not in _ATTRIBUTES]
        self.visit(base)

    def _use(self, name: str) -> None:
        root, dot, rest = name.partition(".")
        if root in RULES["builtins"] and not dot and root not in self.aliases:
            self.names.append(name)
            return
        for start in self.aliases.get(root, ()):
            path = start + dot + rest
            self.names.append(path)
            if problem := refusal_of_name(path):
                self.problems.append(problem)
            elif arguments_that_load(path):
                self.problems.append(f"{path} loads what its arguments name, so it must be a _target_ that names them")
        if root not in self.aliases:
            self.problems.append(f"{name} is not in the allow-list")


_ATTRIBUTES = frozenset(RULES["attributes"])


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
