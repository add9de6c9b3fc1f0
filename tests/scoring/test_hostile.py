"""Input made to do harm: each is refused, or does nothing. Configs: test_inspection.py; bundles: test_zoo.py."""

import ast
import csv
import gzip
import json
import resource
import shutil
import struct
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from conftest import ROOT
from exams import dicom_exam, prepare, write_text
from hypothesis import given
from hypothesis import strategies as st
from programs import Bomb
from pydicom.uid import DeflatedExplicitVRLittleEndian
from small_cohort import COLUMNS, write_manifest

from mri_alm.bundle.trained_run import SCORE_COLUMNS, TrainedRun
from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.prepare_cohort import write_page
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.dicom_files import DAMAGED, find_studies, read_dicom
from mri_alm.imaging.image_file import read_image
from mri_alm.runtime.files import sha256
from mri_alm.runtime.tables import escape_formula, read_table, unescape_formula, write_csv

VOXELS = np.random.default_rng(0).uniform(0, 900, (6, 8, 10)).astype(np.float32)


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_a_pickle_payload_is_refused_even_with_the_right_digest(
    trained: Path, tmp_path: Path
) -> None:
    run, marker = Path(shutil.copytree(trained, tmp_path / "run")), tmp_path / "exploded"
    path, record = run / "split_0" / "model.pt", json.loads((run / "threshold.json").read_text())
    torch.save({"model": Bomb(marker)}, path)
    record["checkpoints"]["split_0"] = sha256(path)
    (run / "threshold.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"model\.pt is no checkpoint of this project: its archive names "):
        TrainedRun(run).ensemble()
    assert not marker.exists()


# --- Manifests ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    """A folder with images, beside files it must not reach."""
    folder = tmp_path / "cohort"
    (tmp_path / "private").mkdir()
    folder.mkdir()
    for place in (folder, tmp_path / "private"):
        for name in ("t2", "adc", "hbv"):
            (place / f"{name}.nii").write_text("")
    (folder / "link.nii").symlink_to(tmp_path / "private" / "t2.nii")
    (folder / "inner.nii").symlink_to(folder / "t2.nii")
    (folder / "far").symlink_to(tmp_path / "private")
    (folder / "circle").symlink_to(folder / "circle")
    return folder


def manifest(folder: Path, t2: str, study: str = "S0") -> Path:
    rows = [[study, "P0", "1", "train", t2, "adc.nii", "hbv.nii"]]
    return write_manifest(folder / "manifest.csv", rows, COLUMNS)


@pytest.mark.parametrize("t2", ["../private/t2.nii", "{private}/t2.nii", "link.nii", "far/t2.nii", "far/../t2.nii"])
def test_a_manifest_reaches_nothing_outside_its_folder(cohort: Path, t2: str) -> None:
    t2 = t2.format(private=cohort.parent / "private")
    (cohort.parent / "t2.nii").write_text("")
    with pytest.raises(
        InputError, match=r"names .* in column t2, outside the manifest's folder\. Move it there, or allow"
    ):
        read_manifest(manifest(cohort, t2))
    assert read_manifest(manifest(cohort, t2), allow_outside_paths=True)[0].images["t2"].exists()


@pytest.mark.parametrize("t2", ["t2.nii", "inner.nii", "./t2.nii", "../cohort/t2.nii", "{cohort}/t2.nii"])
def test_what_lies_inside_is_read_by_whatever_way(cohort: Path, t2: str) -> None:
    assert read_manifest(manifest(cohort, t2.format(cohort=cohort)))[0].images["t2"].exists()


@pytest.mark.parametrize("t2", ["circle", "x" * 5000])
def test_paths_that_no_system_takes_are_sentences_not_tracebacks(cohort: Path, t2: str) -> None:
    with pytest.raises(InputError, match=r"names .* in column t2, which does not exist"):
        read_manifest(manifest(cohort, t2))


@pytest.mark.parametrize("names", [{"t2": "a\0b.nii"}, {"t2": "t2.nii", "study": "a\0b"}])
def test_zero_bytes_in_a_table_are_a_sentence(cohort: Path, names: dict[str, str]) -> None:
    with pytest.raises(InputError, match="line 2 holds zero bytes: the file is damaged"):
        read_manifest(manifest(cohort, *names.values()))


@pytest.mark.parametrize("study", ["../x", "a\\b", "..", ".hidden", "x" * 101, "a\x1b[2Jb", "a\nb", "a\u202eb"])
def test_a_study_s_name_that_is_no_file_name_is_refused(cohort: Path, study: str) -> None:
    with pytest.raises(InputError, match="has no usable name in column study"):
        read_manifest(manifest(cohort, "t2.nii", study))


# --- Spreadsheets and pages -------------------------------------------------------------------------------------------

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-A1", "@SUM(1)", "\t=1", "\r=1", "\n=1", "  =1", "'=1", "-1 =2"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_text_is_a_formula_in_a_spreadsheet(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scores.csv"
    row = dict.fromkeys(SCORE_COLUMNS, text) | {"score": -0.5, "logit": -1e-7}
    write_csv(path, SCORE_COLUMNS, [row])
    with path.open(newline="", encoding="utf-8") as file:
        (shown,) = csv.DictReader(file)
    text = text.replace("\r", "\n")
    assert shown["study"] == f"'{text}"
    assert (shown["score"], shown["logit"]) == ("-0.5", "-1e-07")  # numbers stay numbers
    assert read_table(path, ("study",))[0]["study"].strip() == text.strip()


@given(st.text(alphabet="'=+-@\t\r\n ab1.,\"", max_size=8))
def test_every_text_reads_back(text: str) -> None:
    cell = escape_formula(text)
    assert unescape_formula(cell) == text.replace("\r\n", "\n").replace("\r", "\n")
    first = cell.lstrip(" \t\r\n\x0b\x0c")[:1]
    if first and first in "=+-@":
        assert [float(word) for word in cell.split()]


def test_every_csv_is_written_by_the_one_function() -> None:
    """`phantom_io` writes names that it makes itself."""
    names = {"writer", "DictWriter", "to_csv"}
    for path in [*(ROOT / "mri_alm").rglob("*.py"), *(ROOT / "pipelines").glob("*.py")]:
        used = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
        if path.stem not in ("tables", "engine", "tracking"):  # the last two: TensorBoard's writer
            assert used.isdisjoint(names), path.name


class Tags(HTMLParser):
    """Start tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_names_and_headers_are_text_on_the_qc_page(tmp_path: Path) -> None:
    """report.html's turn is in test_html_report.py, in a browser."""
    script, image = "<script>hacked()</script>", "<img src=x onerror=hacked()>"

    def edit(ds: pydicom.Dataset, _: int) -> None:
        ds.Manufacturer, ds.ManufacturerModelName = f"SIEMENS {script}", f'"{image}'

    dicom_exam(tmp_path / "in" / "a", 0, edit=edit)
    outcome = prepare(tmp_path / "in", tmp_path / "cohort")
    row = dict(outcome.rows[0], study=image, warnings=f"{script} | {image}", status="warn")
    shutil.copytree(tmp_path / "cohort" / outcome.rows[0]["study"], tmp_path / "cohort" / image)
    write_page(tmp_path / "cohort", [row], json.loads((tmp_path / "cohort" / "cohort.json").read_text()))
    page = (tmp_path / "cohort" / "qc.html").read_text("utf-8")
    tags = Tags(page).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert not [attributes for tag, attributes in tags if tag == "img" and attributes.get("src") == "x"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    (policy,) = [a["content"] for tag, a in tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


# --- Images ---------------------------------------------------------------------------------------------------------


def stored(path: Path) -> Path:
    image = sitk.GetImageFromArray(VOXELS)
    image.SetSpacing((2.0, 1.5, 3.0))
    sitk.WriteImage(image, str(path))
    return path


def refused(path: Path) -> None:
    with pytest.raises(StudyError, match="Column t2: ") as error:
        read_image(path, "t2")
    assert error.value.code == "unreadable"


@pytest.mark.parametrize("header", ["x.mhd", "x.mha", "x.nhdr", "x.nrrd"])
@pytest.mark.parametrize(
    "elsewhere", ["{root}/private.raw", "../private.raw", "link.raw", "sub/x.raw", "LIST", "/etc/passwd"]
)
def test_a_header_takes_no_voxels_from_other_files(tmp_path: Path, header: str, elsewhere: str) -> None:
    folder = tmp_path / "exam"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "private.raw", folder / "sub" / "x.raw", folder / "beside.raw"):
        place.write_bytes(VOXELS.tobytes())
    (folder / "link.raw").symlink_to(tmp_path / "private.raw")
    meta = "ObjectType = Image\nNDims = 3\nDimSize = 10 8 6\nElementType = MET_FLOAT\nElementDataFile = "
    nrrd = "NRRD0004\ntype: float\ndimension: 3\nsizes: 10 8 6\nendian: little\nencoding: raw\ndata file: "
    text, ending = (meta, "\n") if header.startswith(("x.mh",)) else (nrrd, "\n\n")
    path = folder / header
    path.write_text(text + "beside.raw" + ending)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(read_image(path, "t2")), VOXELS)  # an honest one
    path.write_text(text + elsewhere.format(root=tmp_path) + ending)
    if "private" in elsewhere:  # the library itself would read it
        np.testing.assert_array_equal(sitk.GetArrayFromImage(sitk.ReadImage(str(path))), VOXELS)
    refused(path)


def test_spellings_and_long_headers_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "private.raw").write_bytes(VOXELS.tobytes())
    exam = tmp_path / "exam"
    exam.mkdir()
    meta = "ObjectType = Image\nNDims = 3\nDimSize = 10 8 6\nElementType = MET_FLOAT\n"
    nrrd = "NRRD0004\ntype: float\ndimension: 3\nsizes: 10 8 6\nendian: little\nencoding: raw\n"
    for name, text in (
        ("a.mha", meta + "ElementDataFile=../private.raw\n"),
        ("b.mha", meta + "  ElementDataFile =   ../private.raw  \r\n"),
        ("c.mhd", meta + "Comment = " + "x" * (1 << 20) + "\nElementDataFile = ../private.raw\n"),
        ("d.nrrd", nrrd + "datafile: ../private.raw\n\n"),
        ("e.nhdr", nrrd + "DATA FILE: ../private.raw\n\n"),
        ("f.nrrd", nrrd + "".join(f"# {'x' * 1000}\n" for _ in range(1100)) + "data file: ../private.raw\n\n"),
        ("g.mha", meta + "ElementDataFile = LOCAL\nElementDataFile = ../private.raw\n"),
        ("h.mhd", meta),
    ):
        (exam / name).write_text(text)
        refused(exam / name)


def test_a_nifti_pair_is_read_from_one_folder_only(tmp_path: Path) -> None:
    (tmp_path / "exam").mkdir()
    stored(tmp_path / "exam" / "x.hdr")
    np.testing.assert_array_equal(sitk.GetArrayFromImage(read_image(tmp_path / "exam" / "x.hdr", "t2")), VOXELS)
    shutil.move(tmp_path / "exam" / "x.img", tmp_path / "private.img")
    (tmp_path / "exam" / "x.img").symlink_to(tmp_path / "private.img")
    refused(tmp_path / "exam" / "x.hdr")


def test_a_name_does_not_choose_another_reader(tmp_path: Path) -> None:
    """ITK knows two dozen formats; three are used."""
    for name in ("x.vtk", "x.png", "x.tif", "x.hdf5", "x"):
        (tmp_path / name).write_text("# vtk DataFile Version 3.0\n")
        refused(tmp_path / name)


def test_a_gzip_bomb_behind_an_honest_header_is_not_unpacked(tmp_path: Path) -> None:
    plain_file = stored(tmp_path / "x.nii")
    zeros = bytes(1 << 24)
    with gzip.open(tmp_path / "bomb.nii.gz", "wb", compresslevel=1) as bomb:
        bomb.write(plain_file.read_bytes())
        for _ in range(40):  # 640 MiB
            bomb.write(zeros)
    assert (tmp_path / "bomb.nii.gz").stat().st_size < 1 << 22
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path / "bomb.nii.gz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("size", [(32767, 32767, 32767), (32767, 32767, 1024)])
def test_a_header_that_claims_terabytes_is_refused_unread(tmp_path: Path, size: tuple[int, ...]) -> None:
    path = stored(tmp_path / "x.nii")
    data = bytearray(path.read_bytes())
    data[42:48] = struct.pack("<3h", *size)
    for name, content in (("x.nii", bytes(data)), ("x.nii.gz", gzip.compress(bytes(data)))):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)


# --- DICOM ----------------------------------------------------------------------------------------------------------


def one_file(tmp_path: Path) -> Path:
    return next((dicom_exam(tmp_path / "exam", 0, without=(6, 7, 8, 9)) / "s4").iterdir())


def test_a_deflated_data_set_is_not_inflated(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    ds = pydicom.dcmread(path)
    ds.Rows, ds.Columns, ds.PixelData = 8192, 8192, bytes(8192 * 8192 * 2)
    ds.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    ds.save_as(path, enforce_file_format=True)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    with pytest.raises(DAMAGED, match="deflated data set"):
        read_dicom(path)
    (study,) = find_studies(tmp_path / "exam")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert path in study.failed or path not in study.files


@pytest.mark.parametrize("depth", [3000, 50_000])
@pytest.mark.parametrize("closed", [True, False])
def test_sequences_nested_thousands_deep_stop_nobody(tmp_path: Path, depth: int, closed: bool) -> None:
    path = one_file(tmp_path)
    data = path.read_bytes()
    at = data.index(b"\xe0\x7f\x10\x00")  # in front of the pixels
    opened = struct.pack("<HH2sHI", 0x0040, 0xA730, b"SQ", 0, 0xFFFFFFFF) + struct.pack(
        "<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF
    )
    ends = struct.pack("<HHI", 0xFFFE, 0xE00D, 0) + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    path.write_bytes(data[:at] + opened * depth + (ends * depth + data[at:] if closed else b""))
    others = sorted(file for file in path.parent.iterdir() if file != path)
    (study,) = [found for found in find_studies(tmp_path / "exam") if found.files]
    assert set(others) <= set(study.files)


# --- Nothing is unpickled -------------------------------------------------------------------------------------------

FOLDERS = ("mri_alm", "pipelines", "benchmarks", "docker")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
LOADERS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
NEVER = {
    "joblib.load", "joblib.dump", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "pd.read_pickle", "os.system", "eval", "exec",
    "__import__", "np.memmap",
}  # fmt: skip


def unsafe(source: str) -> list[str]:
    """Lines that unpickle, evaluate, or could."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            names = {(module or alias.name).partition(".")[0] for alias in node.names}
            names |= {
                f"{module}.{alias.name}"
                for alias in node.names
                if f"{module}.{alias.name}" in LOADERS | dict.fromkeys(NEVER)
            }
            found += [f"{node.lineno}: import {name}" for name in names if name in MODULES or "." in name]
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in NEVER or given.get("shell", "False") != "False" or given.get("allow_pickle", "False") != "False":
            found.append(f"{node.lineno}: {name}")
        elif name == "torch.load" and given.get("weights_only") != "True":
            found.append(f"{node.lineno}: {name} without weights_only=True")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    found = [line.partition(": ")[2] for line in unsafe(path.read_text("utf-8"))]
    assert found == (["import pickle"] if path.name == "archive.py" else [])  # an unpickler that makes arrays only


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import dill as d", "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)", "np.load(f, allow_pickle=True)", "numpy.load(f, allow_pickle=x)",
        "joblib.load(f)", "from joblib import load", "eval(x)", "exec(x)", "os.system(x)",
        "subprocess.run(x, shell=True)",
        "yaml.load(f, Loader=L)", "from torch import load", "def f():\n    import marshal",
    ],
)  # fmt: skip
def test_what_unpickles_is_seen(source: str) -> None:
    assert len(unsafe(source)) == 1


def test_configs_name_no_pickle_but_the_hash_of_transforms() -> None:
    """`pickle_hashing` serialises in order to hash, and reads nothing."""
    for path in (ROOT / "configs").rglob("*.json"):
        text = path.read_text("utf-8").replace("monai.data.utils.pickle_hashing", "")
        for word in ("pickle", "joblib", "torch.load", "np.load", "eval(", "exec(", "__"):
            assert word not in text, path.name


def test_a_message_about_a_hostile_file_names_the_column_not_the_path(tmp_path: Path) -> None:
    path = write_text(tmp_path / "MUELLER" / "x.mha", "ElementDataFile = /etc/passwd\n")
    with pytest.raises(StudyError, match=r"^Column t2: its voxels are not in one file beside its header") as error:
        read_image(path, "t2")
    assert "MUELLER" not in str(error.value)
    assert "passwd" not in str(error.value)
