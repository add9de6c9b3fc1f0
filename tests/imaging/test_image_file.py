"""NIfTI, MHA and NRRD files: what a header may claim, and what counts as an image."""

import gzip
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError
from mri_alm.imaging.image_file import image_header, read_image, write_nifti

VOXELS = np.random.default_rng(0).uniform(0, 900, (6, 8, 10)).astype(np.float32)


def stored(path, array=VOXELS):
    image = sitk.GetImageFromArray(array, isVector=False)
    image.SetSpacing((2.0, 1.5, 3.0))
    sitk.WriteImage(image, str(path))
    return path


def claim(path, at, value):
    """Change a number of a NIfTI header."""
    read, write = (gzip.decompress, gzip.compress) if path.suffix == ".gz" else (bytes, bytes)
    data = bytearray(read(path.read_bytes()))
    data[at : at + len(value)] = value
    path.write_bytes(write(bytes(data)))


@pytest.mark.parametrize("ending", ["nii", "nii.gz", "mha", "nrrd"])
def test_every_format_keeps_voxels_and_spacing(tmp_path, ending):
    image = read_image(stored(tmp_path / f"x.{ending}"), "t2")
    np.testing.assert_array_equal(sitk.GetArrayFromImage(image), VOXELS)
    assert image.GetSpacing() == pytest.approx((2.0, 1.5, 3.0))


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
@pytest.mark.parametrize("size", [(32767, 32767, 32767), (32767, 32767, 300), (400, 400, 400)])
def test_claims_that_no_file_can_hold_are_refused_before_they_are_allocated(tmp_path, ending, size):
    path = stored(tmp_path / f"x.{ending}")
    claim(path, 42, struct.pack("<3h", *size))
    with pytest.raises(StudyError, match=r"Column adc: its header claims [\d,]+ bytes of voxels, more than") as error:
        read_image(path, "adc")
    assert error.value.code == "unreadable"


def test_sizes_that_no_study_has_are_refused_even_if_a_file_may_hold_them(tmp_path):
    path = tmp_path / "x.mhd"
    stored(path)
    path.write_text(path.read_text().replace("DimSize = 10 8 6", "DimSize = 30000 30000 30000"))
    with pytest.raises(StudyError, match=r"Column t2: its header claims 27,000,000,000,000 voxels"):
        read_image(path, "t2")


@pytest.mark.parametrize("ending", ["nii.gz", "mha"])
def test_voxels_that_are_no_numbers_are_not_made_numbers(tmp_path, ending):
    """What becomes of them is the exam's matter: tests/imaging/test_image_exam.py."""
    array = VOXELS.copy()
    array[:, :2], array[:, 2] = np.nan, np.inf
    found = sitk.GetArrayFromImage(read_image(stored(tmp_path / f"x.{ending}", array), "adc"))
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("value", [0.0, 7.0, np.nan])
def test_images_that_say_nothing_are_refused(tmp_path, value):
    with pytest.raises(StudyError, match="every voxel has the same value, or none is finite") as error:
        read_image(stored(tmp_path / "x.nii.gz", np.full((6, 8, 10), value, np.float32)), "t2")
    assert error.value.code == "empty_volume"


def test_colour_and_text_are_refused(tmp_path):
    image = sitk.GetImageFromArray(np.zeros((6, 8, 10, 3), np.uint8), isVector=True)
    sitk.WriteImage(image, str(tmp_path / "x.mha"))
    (tmp_path / "x.nii").write_text("no image")
    with pytest.raises(StudyError, match="it is a colour or vector image"):
        read_image(tmp_path / "x.mha", "t2")
    with pytest.raises(StudyError, match=r"the \.nii file is no image that can be read"):
        read_image(tmp_path / "x.nii", "t2")


def test_threads_never_are_in_itks_files_together(tmp_path, monkeypatch):
    """ITK's readers crash so now and then, too seldom for a test that waits for it."""
    inside, most = 0, 0

    def alone(function):
        def call(*args):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            try:
                return function(*args)
            finally:
                inside -= 1

        return call

    paths = [stored(tmp_path / f"{k}.mha") for k in range(4)]
    monkeypatch.setattr(sitk.ImageFileReader, "ReadImageInformation", alone(sitk.ImageFileReader.ReadImageInformation))
    monkeypatch.setattr(sitk.ImageFileReader, "Execute", alone(sitk.ImageFileReader.Execute))
    monkeypatch.setattr(sitk, "WriteImage", alone(sitk.WriteImage))
    start = threading.Barrier(len(paths))

    def read_and_write(path):
        start.wait()
        write_nifti(path.with_suffix(".nii.gz"), read_image(path, "t2"))

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(read_and_write, paths))
    assert most == 1


def test_an_absent_file_is_refused_without_its_path(tmp_path):
    with pytest.raises(StudyError, match=r"^Column hbv: the \.nii file is no image") as error:
        read_image(tmp_path / "SECRET.nii", "hbv")
    assert "SECRET" not in str(error.value)


LARGE = np.random.default_rng(1).uniform(0, 900, (8, 20, 30)).astype(np.float32)


@pytest.mark.parametrize("ending", ["nii", "nii.gz", "mha", "nrrd"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_size_that_leaves_voxels_over_is_refused_not_sheared(tmp_path, ending, packed):
    path = tmp_path / f"x.{ending}"
    sitk.WriteImage(sitk.GetImageFromArray(LARGE), str(path), packed)
    if ending.startswith("nii"):
        claim(path, 42, struct.pack("<h", 29))
    else:
        path.write_bytes(path.read_bytes().replace(b"30 20 8", b"29 20 8"))
    with pytest.raises(
        StudyError, match=r"Column t2: (its file|the \.\w+ file) holds more voxels than its header says"
    ):
        read_image(path, "t2")


@pytest.mark.parametrize("ending", ["nii.gz", "mha", "nrrd"])
def test_damage_among_packed_voxels_is_noticed(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    sitk.WriteImage(sitk.GetImageFromArray(LARGE), str(path), True)
    content = bytearray(path.read_bytes())
    for place in (len(content) - 60, len(content) // 2):
        content[place] ^= 4
        path.write_bytes(bytes(content))
        with pytest.raises(StudyError, match="cut short or damaged") as error:
            read_image(path, "t2")
        assert error.value.code == "unreadable"


META = (
    "ObjectType = Image\nNDims = 3\nBinaryData = True\n{}ElementSpacing = 2 1.5 3\nDimSize = 10 8 6\n"
    "ElementType = MET_FLOAT\nElementDataFile = LOCAL\n"
)
NRRD = "NRRD0004\ntype: float\ndimension: 3\nsizes: 10 8 6\nendian: little\nencoding: raw\n{}\n"
AXES = "space directions: (2,0,0) (0,1.5,0) (0,0,3)\nspace origin: (1,2,3)\n"


def written(folder, form, lines):
    path = folder / ("x.mha" if form is META else "x.nrrd")
    path.write_bytes(form.format(lines).encode() + VOXELS.tobytes())
    return path


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        (META, "TransformMatrix = 1 0 0 0.01 1 0 0 0 1\nOffset = 1 2 3\n"),
        (NRRD, "space: LPS\n" + AXES.replace("(0,1.5,0)", "(0.015,1.5,0)")),
    ],
)
def test_sheared_axes_are_refused_in_every_format(tmp_path, form, lines):
    with pytest.raises(StudyError, match=r"its axes are not perpendicular \(sheared by 0\.57 degrees\)") as error:
        read_image(written(tmp_path, form, lines), "adc")
    assert error.value.code == "geometry"


def test_axes_that_are_no_unit_vectors_are_refused(tmp_path):
    path = written(tmp_path, META, "TransformMatrix = 2 0 0 0 2 0 0 0 2\nOffset = 1 2 3\n")
    with pytest.raises(StudyError, match="the directions of its axes are no unit vectors"):
        read_image(path, "adc")


@pytest.mark.parametrize(
    ("form", "lines", "placed", "origin"),
    [
        (META, "", False, (0, 0, 0)),
        (META, "TransformMatrix = 1 0 0 0 1 0 0 0 1\n", False, (0, 0, 0)),
        (META, "TransformMatrix = 1 0 0 0 1 0 0 0 1\nOffset = 1 2 3\n", True, (1, 2, 3)),
        (META, "Orientation = 1 0 0 0 1 0 0 0 1\nPosition = 1 2 3\n", True, (1, 2, 3)),
        (NRRD, "", False, (0, 0, 0)),
        (NRRD, "spacings: 2 1.5 3\n", False, (0, 0, 0)),
        (NRRD, "space: LPS\n" + AXES, True, (1, 2, 3)),
        (NRRD, "space: left-posterior-superior\n" + AXES, True, (1, 2, 3)),
        (NRRD, "space: right-anterior-superior\n" + AXES, True, (-1, -2, 3)),
        (NRRD, "space: LAS\n" + AXES, True, (1, -2, 3)),
        (NRRD, "space: scanner-xyz\n" + AXES, False, (1, 2, 3)),
        (NRRD, "space dimension: 3\n" + AXES, False, (1, 2, 3)),
    ],
)
def test_what_places_an_image(tmp_path, form, lines, placed, origin):
    header = image_header(written(tmp_path, form, lines), "t2")
    assert header.placed is placed
    assert header.origin == origin


@pytest.mark.parametrize("unit", ["um", "cm", "inch", "meter"])
def test_another_unit_of_length_is_refused(tmp_path, unit):
    lines = f'space: LPS\nspace units: "{unit}" "{unit}" "{unit}"\n' + AXES
    with pytest.raises(StudyError, match=f"its unit of length is {unit}, not mm"):
        read_image(written(tmp_path, NRRD, lines), "t2")
    read_image(written(tmp_path, NRRD, lines.replace(unit, "mm")), "t2")
