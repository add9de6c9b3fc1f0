"""Who may import whom, and what the library must not contain. Read from the sources, so nothing has to be run."""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import mri_alm

ROOT = Path(__file__).parents[1]
LIBRARY = {path.stem: path for path in sorted((ROOT / "mri_alm").glob("*.py"))}
PROGRAMS = sorted((ROOT / "pipelines").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.json"))

# A module, and all it imports from the package. ``__init__`` may import any module, and no module imports the package.
EDGES = {
    "allowed_names": set(),
    "alm": {"epoch_sums", "errors", "processes", "ranking", "schedule", "scores"},
    "atomic": {"errors"},
    "batches": {"errors", "processes"},
    "benchmark_multiclass": {"benchmark_plan", "errors", "files", "metrics"},
    "benchmark_plan": {"errors"},
    "benchmark_report": {"benchmark_plan", "comparison", "errors", "files"},
    "benchmark_run": {"benchmark_plan", "files", "locks", "tasks"},
    "bundle": {"errors", "files", "processes", "schedule"},
    "cache": {"files"},
    "calibration": {"errors", "metrics"},
    "cells": set(),
    "cifar": {"errors"},
    "cifar_batches": {"cifar_sets", "errors"},
    "cifar_job": {"bundle", "cifar_sets", "ensemble", "errors", "files", "locks", "metrics", "processes"},
    "cifar_sets": {"cifar", "errors"},
    "cohort": {"errors", "files", "places"},
    "cohort_check": {"prepared_cohort"},
    "cohort_rules": {"errors", "series"},
    "cohort_text": {"errors", "files", "labels", "prepared_cohort", "selection", "series"},
    "comparison": {"errors", "metrics", "statistics"},
    "constraint": {"errors"},
    "content": {"diffusion", "errors"},
    "dicom": {"dicom_file", "errors", "headers", "nameless", "selection", "series", "volume"},
    "dicom_file": set(),
    "diffusion": {"errors"},
    "engine": {"alm", "atomic", "batches", "errors", "files", "metrics", "processes"},
    "ensemble": {"errors", "files", "inspection", "operating_point", "processes"},
    "epoch_sums": {"ranking"},
    "errors": set(),
    "explain": {"files"},
    "files": {"atomic", "cells", "errors", "locks"},
    "images": {"content", "dicom", "diffusion", "errors", "image_file", "registration", "volume"},
    "inspection": {"allowed_names", "errors"},
    "labels": {"cohort", "cohort_rules", "errors", "sources"},
    "layouts": {"cohort_rules", "dicom", "errors", "image_file", "labels", "named_files", "sources"},
    "evaluation": {"calibration", "errors", "evaluation_data", "metrics", "statistics", "summary", "threshold"},
    "evaluation_data": {"errors", "files", "threshold"},
    "evaluation_files": {
        "atomic",
        "evaluation",
        "evaluation_tables",
        "files",
        "full_evaluation",
        "html_report",
        "tables",
    },
    "evaluation_tables": {"evaluation", "evaluation_data", "summary", "tables", "trade_off"},
    "full_evaluation": {"evaluation", "evaluation_data", "run_record", "threshold", "trade_off"},
    "html_figures": {"calibration", "evaluation", "evaluation_data"},
    "html_report": {"evaluation_tables", "files", "full_evaluation", "html_figures", "model_card", "trade_off"},
    "job": {
        "atomic",
        "bundle",
        "cohort",
        "ensemble",
        "errors",
        "files",
        "locks",
        "metrics",
        "phantom_io",
        "processes",
        "run_report",
        "split_training",
        "summary",
        "tasks",
        "threshold",
        "tracking",
    },
    "headers": {"dicom_file", "diffusion", "errors", "series", "sources", "tasks"},
    "image_file": {"dicom_file", "errors", "files", "volume"},
    "lifeline": set(),
    "locks": {"errors"},
    "losses": {"errors"},
    "losses_auc": {"errors", "losses"},
    "losses_monai": {"losses"},
    "losses_multiclass": {"errors", "losses"},
    "metrics": {"errors"},
    "model_card": {"full_evaluation", "run_record"},
    "networks_cifar": {"errors", "losses_multiclass", "networks"},
    "networks": {"errors", "losses_multiclass"},
    "named_files": {"cohort_rules", "files", "sources"},
    "nameless": {"content", "errors", "series", "volume"},
    "operating_point": {"errors"},
    "phantom": {"diffusion", "errors", "phantom_anatomy", "phantom_canvas"},
    "phantom_anatomy": {"phantom_canvas"},
    "phantom_canvas": set(),
    "phantom_dicom": {"phantom"},
    "phantom_io": {"atomic", "errors", "files", "locks", "phantom", "phantom_dicom"},
    "phantom_template": {
        "dicom",
        "errors",
        "phantom",
        "phantom_anatomy",
        "phantom_canvas",
        "phantom_io",
        "registration",
    },
    "places": set(),
    "processes": {"errors"},
    "ranking": {"constraint", "errors", "scores"},
    "preparation": {
        "atomic",
        "cohort_rules",
        "dicom",
        "dicom_file",
        "errors",
        "files",
        "images",
        "qc_picture",
        "selection",
        "series",
        "sources",
    },
    "prepared_cohort": {
        "atomic",
        "cohort_rules",
        "dicom",
        "errors",
        "files",
        "labels",
        "layouts",
        "locks",
        "preparation",
        "qc_page",
        "sources",
        "tasks",
        "workers",
    },
    "qc_page": {"files"},
    "qc_picture": set(),
    "registration": {"errors"},
    "report": set(),
    "run_record": {"errors", "files", "operating_point", "places", "threshold"},
    "run_report": {"full_evaluation", "html_report", "report"},
    "schedule": {"errors", "scores"},
    "scores": {"errors"},
    "scoring": {
        "atomic",
        "bundle",
        "cohort",
        "dicom",
        "ensemble",
        "errors",
        "evaluation_data",
        "explain",
        "files",
        "operating_point",
        "places",
        "report",
        "structured_report",
        "threshold",
    },
    "search": {"benchmark_plan", "errors", "files", "tasks"},
    "selection": {"diffusion", "errors", "series", "volume"},
    "series": {"diffusion", "errors"},
    "sources": {"errors", "files"},
    "split_training": {"bundle", "cohort", "ensemble", "errors", "files", "processes"},
    "statistics": {"errors", "metrics"},
    "structured_report": {"dicom", "errors", "operating_point"},
    "summary": {"metrics"},
    "tables": {"files"},
    "tasks": {"atomic", "errors", "lifeline"},
    "threshold": {"errors", "metrics", "operating_point"},
    "tracking": {"bundle", "errors", "files", "places"},
    "transforms": {"images"},
    "trade_off": {"evaluation", "metrics", "statistics", "threshold"},
    "volume": {"dicom_file", "errors", "series"},
    "workers": {"atomic", "dicom_file", "errors", "preparation", "tasks"},
    "zoo": {"atomic", "ensemble", "errors", "explain", "files"},
}

# What a module must not know: losses and the constraint work without MONAI, figures of merit without torch too.
FREE_OF_MONAI = (
    "alm", "batches", "constraint", "losses", "losses_multiclass", "processes", "ranking", "schedule", "scores",
)  # fmt: skip
FREE_OF_TORCH = (
    "calibration", "evaluation", "html_figures", "metrics", "operating_point", "statistics", "tables", "tasks",
    "threshold", "trade_off",
)  # fmt: skip
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


WRITING = {  # methods and functions that write to the path they are given
    "copy2", "copyfile", "copytree", "dump", "export", "imsave", "imwrite", "move", "save", "save_as", "save_file",
    "savefig", "savetxt", "savez", "to_csv", "to_filename", "to_html", "to_json", "to_parquet", "touch", "write_bytes",
    "write_html", "write_image", "write_text", "writestr", "WriteImage", "NamedTemporaryFile", "SummaryWriter",
}  # fmt: skip
MEMORY = ("buffer",)  # names of io.BytesIO and io.StringIO; ours to keep
UNFINISHED = ("part", "plain")  # names that mri_alm.atomic.complete gave
ALLOWED = {  # module: (what it calls, why it may)
    "locks": ({"open"}, "a lock file is no result"),
    "engine": ({"SummaryWriter"}, "TensorBoard appends to its event files; split.json holds the same figures"),
    "phantom_dicom": ({"save_as"}, "into a folder that phantom_io renames when it is whole"),
    "html_figures": ({"to_json"}, "plotly's gives a string"),
    "evaluation_files": ({"to_json"}, "its own, gives a dictionary"),
    "job": ({"to_json"}, "OperatingPoint's gives a dictionary"),
    "scoring": ({"to_json"}, "OperatingPoint's gives a dictionary"),
}


def in_place_writes(source: str) -> list[tuple[str, int]]:
    """Calls that write to a file which is neither in memory nor a name that ``complete`` gave, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = function.value if isinstance(function, ast.Attribute) else None
        names = {n.id for part in (owner, *node.args) if part for n in ast.walk(part) if isinstance(n, ast.Name)}
        modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        opens = name == "open" and any(
            isinstance(mode, str) and re.fullmatch("[rb]*[wax+][b+t]*", mode) for mode in modes
        )
        direct = isinstance(owner, ast.Name) or owner is None or isinstance(owner, ast.BinOp)
        if (opens or (name in WRITING and direct)) and names.isdisjoint((*MEMORY, *UNFINISHED)):
            found.append((name, node.lineno))
    return found


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


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('x')", "(folder / 'x').write_bytes(b'x')", "torch.save(state, path)", "open(path, 'w')",
        "path.open('wb')", "path.open(mode='a+')", "sitk.WriteImage(image, str(path))", "frame.to_csv(path)",
        "json.dump(x, file)", "np.save(path, x)", "figure.savefig(path)", "shutil.copyfile(one, path)", "path.touch()",
        "open(path, encoding='utf-8', mode='x')",
    ],
)  # fmt: skip
def test_writes_in_place_are_seen(line: str) -> None:
    assert in_place_writes(line) != []


@pytest.mark.parametrize(
    "line",
    [
        "path.open('rb')", "open(path)", "path.open(newline='', encoding='utf-8')", "torch.save(state, buffer)",
        "part.write_bytes(b'x')", "(part / 'x').write_bytes(b'x')", "json.dumps(x)", "figure.savefig(buffer, dpi=80)",
        "sitk.WriteImage(image, str(plain))",
    ],
)  # fmt: skip
def test_writes_to_memory_and_beside_are_not(line: str) -> None:
    assert in_place_writes(line) == []


@pytest.mark.parametrize("path", [*LIBRARY.values(), *PROGRAMS], ids=lambda path: path.stem)
def test_every_write_is_complete_or_absent(path: Path) -> None:
    """What goes round ``mri_alm.atomic.complete`` leaves half a file after a crash: only what the table allows does."""
    found = in_place_writes(path.read_text("utf-8"))
    allowed, _ = ALLOWED.get(path.stem, (set(), ""))
    own = {"write_bytes"} if path.stem != "atomic" else set()  # mri_alm.files.write_bytes is the way
    assert [(name, line) for name, line in found if name not in allowed | own] == []
    assert allowed <= {name for name, _ in found}, "a line of the table that nothing needs any more"


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


def test_names_of_the_package_are_loaded_when_used() -> None:
    for name in mri_alm.__all__:
        assert getattr(mri_alm, name) is not None
    with pytest.raises(AttributeError, match="module 'mri_alm' has no attribute 'jobs'"):
        mri_alm.jobs  # noqa: B018


def test_reading_exams_needs_neither_torch_nor_monai() -> None:
    """They take ten seconds to import; a dry run or a check takes two."""
    code = (
        "import sys, mri_alm.cohort_text, mri_alm.cohort_check; print({'torch', 'monai', 'sklearn'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    metadata = json.loads((ROOT / "configs" / "metadata.json").read_text("utf-8"))
    assert {version("mri-alm"), citation["version"], metadata["version"]} == {version("mri-alm")}
