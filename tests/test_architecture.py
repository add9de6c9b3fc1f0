"""Who may import whom, and what the library must not contain. Read from the sources, so nothing has to be run."""

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import mri_alm

ROOT = Path(__file__).parents[1]
LIBRARY = {
    path.relative_to(ROOT / "mri_alm").with_suffix("").as_posix(): path
    for path in sorted((ROOT / "mri_alm").rglob("*.py"))
}
ROOMS = sorted(path.parent for path in (ROOT / "mri_alm").glob("*/__init__.py"))
PROGRAMS = {name.removeprefix("programs/") for name in LIBRARY if name.startswith("programs/")} - {"__init__"}
SCRIPTS = sorted((ROOT / "pipelines").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.json"))


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
UNFINISHED = ("part", "plain")  # names that mri_alm.runtime.atomic.write_atomically gave
ALLOWED = {  # module: (what it calls, why it may)
    "runtime/atomic": ({"open"}, "append_lines adds to a table line by line; a torn last line is recognised"),
    "training/engine": ({"SummaryWriter"}, "TensorBoard appends to its event files; split.json holds the same figures"),
    "phantom/dicom": ({"save_as"}, "into a folder that phantom.cohort renames when it is whole"),
    "evaluation/figures": ({"to_json"}, "plotly's gives a string"),
    "evaluation/report": ({"to_json"}, "its own, gives a dictionary"),
    "training/run": ({"to_json"}, "OperatingPoint's gives a dictionary"),
    "scoring/new_exams": ({"to_json"}, "OperatingPoint's gives a dictionary"),
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


@pytest.mark.parametrize(
    ("name", "path"), [*LIBRARY.items(), *((f"pipelines/{path.stem}", path) for path in SCRIPTS)], ids=str
)
def test_every_write_is_complete_or_absent(name: str, path: Path) -> None:
    """What goes round ``atomic.complete`` leaves half a file after a crash: only what the table allows does."""
    found = in_place_writes(path.read_text("utf-8"))
    allowed, _ = ALLOWED.get(name, (set(), ""))
    own = {"write_bytes"} if name != "runtime/atomic" else set()  # mri_alm.runtime.files.write_bytes is the way
    assert [(call, line) for call, line in found if call not in allowed | own] == []
    assert allowed <= {call for call, _ in found}, "a line of the table that nothing needs any more"


@pytest.mark.parametrize(("name", "path"), LIBRARY.items(), ids=LIBRARY)
def test_library_is_clean(name: str, path: Path) -> None:
    """Programs print and parse arguments; nothing else does."""
    source = path.read_text("utf-8")
    program = [fault for fault in faults(source) if fault == "argparse" or fault.endswith(": print")]
    assert [fault for fault in faults(source) if not (name.startswith("programs/") and fault in program)] == []
    outside = {"pipelines", "benchmarks", "tests", *(script.stem for script in SCRIPTS)}
    assert packages(source).isdisjoint(outside)
    assert len(source.splitlines()) <= 500


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_only_starts_the_program_of_its_name(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    start = ["", "from mri_alm.programs.command import start_program", "", 'if __name__ == "__main__":']
    assert lines[1:] == [*start, f'    start_program("{path.stem}")']
    assert path.stem in PROGRAMS


@pytest.mark.parametrize("name", sorted(dotted_names()))
def test_name_in_configs_exists(name: str) -> None:
    assert callable(resolve_name(name))


def test_configs_name_faces_only() -> None:
    """``mri_alm.room.name``, so that files inside a room may move."""
    assert {name for name in dotted_names() if name.count(".") != 2} == set()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_room_is_small_and_says_what_may_live_in_it(room: Path) -> None:
    files = [path for path in room.iterdir() if path.is_file()]
    assert len(files) <= 12
    assert len(ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or "") > 40
    assert (ROOT / "tests" / room.name).is_dir(), "tests mirror the rooms"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_face_exists(room: Path) -> None:
    package = resolve_name(f"mri_alm.{room.name}")
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_names_of_the_package_are_loaded_when_used() -> None:
    for name in mri_alm.__all__:
        assert getattr(mri_alm, name) is not None
    with pytest.raises(AttributeError, match="module 'mri_alm' has no attribute 'jobs'"):
        mri_alm.jobs  # noqa: B018


def test_reading_exams_needs_neither_torch_nor_monai() -> None:
    """They take ten seconds to import; a dry run or a check takes two."""
    code = "import sys, mri_alm.cohort.overview; print({'torch', 'monai', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


def test_programs_read_their_arguments_before_anything_slow_is_imported() -> None:
    names = ", ".join(f"mri_alm.programs.{name}" for name in sorted(PROGRAMS))
    code = f"import sys, {names}; print({{'torch', 'monai', 'numpy', 'SimpleITK', 'tqdm'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    metadata = json.loads((ROOT / "configs" / "metadata.json").read_text("utf-8"))
    assert {version("mri-alm"), citation["version"], metadata["version"]} == {version("mri-alm")}


def test_no_public_name_means_two_things() -> None:
    """Functions and classes of the library by their bare names, which imports and reviews use."""
    homes: dict[str, list[str]] = {}
    for module, path in LIBRARY.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                if module.removeprefix("programs/") in PROGRAMS and node.name in ("parser", "main"):
                    continue  # what every program has
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_the_wheel_holds_every_room_and_every_config() -> None:
    """Its packages are listed, as the configs come from beside the package."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "mri_alm").rglob("__init__.py")}
    folders = {ROOT / place: name for name, place in built["package-dir"].items()}
    assert set(built["packages"]) == rooms | set(folders.values())
    for path in (ROOT / "configs").rglob("*.*"):
        assert any(path.match(form) for form in built["package-data"][folders[path.parent]]), path
