"""Which names a bundle config may reach, and which expressions it may hold: decided from the text, nothing is run.

Everything is refused but what ``inspection_rules.json`` lists. A dotted name is looked up in the installed packages
that it allows, and the object found must itself be defined in an allowed place: ``torch.nn.modules.module.os.system``
starts in one and ends in ``posix``. docs/security.md says what this cannot see.
"""

import ast
import json
import pkgutil
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from inspect import isroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any

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
