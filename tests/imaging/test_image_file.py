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
from mri_alm.imaging.image_file import read_image, write_nifti

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


def test_voxels_that_are_not_finite_become_zero(tmp_path):
    """Programs that fit ADC maps mark the background so."""
    array = VOXELS.copy()
    array[:, :2], array[:, 2] = np.nan, np.inf
    found = sitk.GetArrayFromImage(read_image(stored(tmp_path / "x.nii.gz", array), "adc"))
    assert (found[:, :3] == 0).all()
    np.testing.assert_array_equal(found[:, 3:], VOXELS[:, 3:])


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

    paths = [stored(tmp_path / f"{k}.nii.gz") for k in range(4)]
    monkeypatch.setattr(sitk.ImageFileReader, "ReadImageInformation", alone(sitk.ImageFileReader.ReadImageInformation))
    monkeypatch.setattr(sitk.ImageFileReader, "Execute", alone(sitk.ImageFileReader.Execute))
    monkeypatch.setattr(sitk, "WriteImage", alone(sitk.WriteImage))
    start = threading.Barrier(len(paths))

    def read_and_write(path):
        start.wait()
        write_nifti(path.with_name(f"again_{path.name}"), read_image(path, "t2"))

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(read_and_write, paths))
    assert most == 1


def test_an_absent_file_is_refused_without_its_path(tmp_path):
    with pytest.raises(StudyError, match=r"^Column hbv: the \.nii file is no image") as error:
        read_image(tmp_path / "SECRET.nii", "hbv")
    assert "SECRET" not in str(error.value)
