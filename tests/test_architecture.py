"""Who may import whom, and what the library must not contain. Read from the sources, so nothing has to be run."""

import ast
import json
import re
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LIBRARY = {path.stem: path for path in sorted((ROOT / "mri_alm").glob("*.py"))}
PROGRAMS = sorted((ROOT / "pipelines").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.json"))

# A module, and all it imports from the package. ``__init__`` may import any module, and no module imports the package.
EDGES = {
    "alm": {"constraint", "errors"},
    "bundle": {"errors", "files"},
    "calibration": {"errors", "metrics"},
    "calibration_cohort": {"ensemble", "errors", "operating_point", "threshold"},
    "cohort": {"errors"},
    "constraint": {"errors"},
    "dicom": {"diffusion", "errors", "selection", "series", "volume"},
    "diffusion": {"errors"},
    "engine": {"alm", "errors", "files"},
    "ensemble": {"errors", "files", "operating_point"},
    "errors": set(),
    "explain": {"files"},
    "files": {"errors"},
    "job": {"bundle", "cohort", "ensemble", "errors", "files", "metrics", "phantom_io", "threshold"},
    "losses": {"errors"},
    "losses_multiclass": {"errors", "losses"},
    "metrics": {"errors"},
    "networks": {"errors"},
    "operating_point": {"errors"},
    "phantom": {"diffusion", "errors", "phantom_anatomy", "phantom_canvas"},
    "phantom_anatomy": {"phantom_canvas"},
    "phantom_canvas": set(),
    "phantom_dicom": {"phantom"},
    "phantom_io": {"errors", "phantom", "phantom_dicom"},
    "phantom_template": {
        "dicom",
        "errors",
        "phantom",
        "phantom_anatomy",
        "phantom_canvas",
        "phantom_io",
        "registration",
    },
    "registration": {"errors"},
    "report": set(),
    "scoring": {
        "bundle",
        "cohort",
        "dicom",
        "ensemble",
        "errors",
        "explain",
        "files",
        "operating_point",
        "report",
        "structured_report",
    },
    "selection": {"diffusion", "errors", "series", "volume"},
    "series": {"diffusion", "errors"},
    "statistics": {"errors", "metrics"},
    "structured_report": {"dicom", "errors", "operating_point"},
    "threshold": {"errors", "metrics", "operating_point"},
    "transforms": {"dicom", "diffusion", "errors", "registration"},
    "volume": {"errors", "series"},
}

# What a module must not know: losses and the constraint work without MONAI, figures of merit without torch too.
FREE_OF_MONAI = ("alm", "constraint", "losses", "losses_multiclass")
FREE_OF_TORCH = ("calibration", "metrics", "operating_point", "statistics", "threshold")
UNKNOWN = {module: {"monai", "ignite"} for module in FREE_OF_MONAI} | {
    module: {"monai", "ignite", "torch"} for module in FREE_OF_TORCH
}


def imported(source: str) -> set[str]:
    """Dotted names of everything a source imports, anywhere in it; names taken from a package count as its modules."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["mri_alm" if node.level else "", node.module]))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def inner_edges(source: str) -> set[str]:
    """The modules of the package that a source imports; ``mri_alm`` itself where it imports the package."""
    found = set()
    for name in imported(source):
        package, _, rest = name.partition(".")
        if package == "mri_alm":
            module = rest.partition(".")[0]
            found.add(module if module in LIBRARY else "mri_alm")
    return found


def packages(source: str) -> set[str]:
    """The top-level packages that a source imports."""
    return {name.partition(".")[0] for name in imported(source)}


def faults(source: str) -> list[str]:
    """Uses of print, assert and argparse in a source, with their lines."""
    found = [f"line {node.lineno}: assert" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    found += [
        f"line {node.lineno}: print"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id == "print"
    ]
    return found + ["argparse"] * ("argparse" in packages(source))


def strings(node: object) -> list[str]:
    """Every string value of a JSON document."""
    if isinstance(node, str):
        return [node]
    if isinstance(node, dict):
        node = list(node.values())
    return [text for item in node for text in strings(item)] if isinstance(node, list) else []


def dotted_names() -> set[str]:
    """Every ``mri_alm.x.y`` of the configs, of targets and of expressions."""
    texts = [text for path in CONFIGS for text in strings(json.loads(path.read_text("utf-8")))]
    return {name for text in texts for name in re.findall(r"\bmri_alm(?:\.\w+)+", text)}


@pytest.mark.parametrize(
    ("source", "edges"),
    [
        ("import mri_alm.alm", {"alm"}),
        ("from mri_alm import alm, losses", {"alm", "losses"}),
        ("from mri_alm.alm import MuSchedule", {"alm"}),
        ("def f():\n    from . import alm\n    from .losses import BinaryCrossEntropy", {"alm", "losses"}),
        ("from mri_alm import AugmentedLagrangian", {"mri_alm"}),
        ("import mri_alm", {"mri_alm"}),
        ("import torch, mri_alms.x\nfrom monai.bundle import ConfigParser", set()),
    ],
)
def test_every_way_to_import_is_seen(source: str, edges: set[str]) -> None:
    assert inner_edges(source) == edges


def test_faults_are_seen() -> None:
    source = "import argparse\nassert True\nf(print)\nprint(1)\nblueprint(2)\n"
    assert faults(source) == ["line 2: assert", "line 3: print", "line 4: print", "argparse"]


def test_table_has_every_module() -> None:
    assert set(EDGES) == set(LIBRARY) - {"__init__"}


@pytest.mark.parametrize("module", EDGES)
def test_module_imports_what_the_table_says(module: str) -> None:
    assert inner_edges(LIBRARY[module].read_text("utf-8")) == EDGES[module]


def test_edges_make_no_circle() -> None:
    TopologicalSorter(EDGES).prepare()


@pytest.mark.parametrize("module", UNKNOWN)
def test_module_does_not_know(module: str) -> None:
    assert packages(LIBRARY[module].read_text("utf-8")).isdisjoint(UNKNOWN[module])


@pytest.mark.parametrize("path", LIBRARY.values(), ids=LIBRARY)
def test_library_is_clean(path: Path) -> None:
    source = path.read_text("utf-8")
    assert faults(source) == []
    outside = {"pipelines", "benchmarks", "tests", *(program.stem for program in PROGRAMS)}
    assert packages(source).isdisjoint(outside)
    assert len(source.splitlines()) <= 300


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_is_short_and_stands_alone(path: Path) -> None:
    source = path.read_text("utf-8")
    assert len(source.splitlines()) < 100
    assert packages(source).isdisjoint({"pipelines", "benchmarks", "tests", *(program.stem for program in PROGRAMS)})


@pytest.mark.parametrize("name", sorted(dotted_names()))
def test_name_in_configs_exists(name: str) -> None:
    assert callable(resolve_name(name))


def test_package_imports_every_module_of_the_configs() -> None:
    """``$import mri_alm`` is all a config says, so an expression reaches only what ``__init__`` imports."""
    named = {name.split(".")[1] for name in dotted_names()}
    assert named, "no config names anything of the package"
    assert named <= inner_edges(LIBRARY["__init__"].read_text("utf-8"))


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    metadata = json.loads((ROOT / "configs" / "metadata.json").read_text("utf-8"))
    assert {version("mri-alm"), citation["version"], metadata["version"]} == {version("mri-alm")}
