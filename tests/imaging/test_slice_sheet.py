"""The slices of an exam as one picture: which way round they lie, what is bright, how large they may be."""

import io

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from PIL import Image

from mri_alm.imaging.pictures import SliceSheet, slice_sheet


def volume(array: NDArray[np.floating], spacing: tuple[float, float, float] = (1.0, 1.0, 3.0)) -> sitk.Image:
    image = sitk.GetImageFromArray(array.astype(np.float32))
    image.SetSpacing(spacing)
    return image


def grey(sheet: SliceSheet) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(sheet.picture)))


@pytest.fixture(scope="module")
def images() -> dict[str, sitk.Image]:
    """Four slices of 32 x 16 pixels; ADC rises from foot to head: 0, 625, 1250, 2500."""
    t2 = np.full((4, 16, 32), 100.0)
    t2[2, :8, 16:] = 200  # third slice from the feet: front, the patient's left
    adc = np.broadcast_to(np.array([0, 625, 1250, 2500])[:, None, None], t2.shape)
    return {"t2": volume(t2), "adc": volume(adc), "hbv": volume(t2[::-1]), "valid": volume(np.ones(t2.shape))}


def test_columns_go_up_from_the_feet_and_the_patient_s_right_is_left(images: dict[str, sitk.Image]) -> None:
    sheet = slice_sheet(images)
    assert (sheet.slices, sheet.depth, sheet.rows, sheet.ratio) == ((1, 2, 3, 4), 4, 3, 2.0)
    picture = grey(sheet).astype(int)
    assert picture.shape == (3 * 16, 4 * 32)
    tiles = picture.reshape(3, 16, 4, 32).transpose(0, 2, 1, 3)  # role, slice, row, column
    assert [tiles[1, k].mean().round() for k in range(4)] == [0, 63, 127, 255]
    bright = tiles[0] > 128
    assert bright.sum() == 8 * 16
    assert bright[2, :8, 16:].all()
    assert (tiles[2] > 128)[1, :8, 16:].all()
    assert Image.open(io.BytesIO(sheet.thumbnail)).size == (4 * 112, 56)


@pytest.mark.parametrize(("order", "flips"), [((0, 1, 2), (True, True, True)), ((2, 0, 1), (False, True, False))])
def test_a_volume_stored_another_way_round_gives_the_same_sheet(
    images: dict[str, sitk.Image], order: tuple[int, ...], flips: tuple[bool, ...]
) -> None:
    turned = {name: sitk.Flip(sitk.PermuteAxes(image, order), flips) for name, image in images.items()}
    assert turned["t2"].GetDirection() != images["t2"].GetDirection()
    assert slice_sheet(turned) == slice_sheet(images)


def test_without_high_b_there_are_two_rows(images: dict[str, sitk.Image]) -> None:
    sheet = slice_sheet({name: image for name, image in images.items() if name != "hbv"})
    assert sheet.rows == 2
    assert grey(sheet).shape == (2 * 16, 4 * 32)


def test_a_large_exam_is_thinned_until_it_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mri_alm.imaging.pictures.SHEET_BYTES", 30_000)
    monkeypatch.setattr("mri_alm.imaging.pictures.SHEET_PIXELS", 48)
    noise = np.random.default_rng(0).normal(500, 200, (33, 64, 64))
    sheet = slice_sheet({"t2": volume(noise), "adc": volume(5 * noise)})
    assert len(sheet.picture) <= 30_000
    assert grey(sheet).shape == (2 * 48, 48 * len(sheet.slices))
    assert (sheet.depth, sheet.slices) == (33, (1, 3, 5, 7, 10, 12, 14, 16, 18, 20, 22, 24, 27, 29, 31, 33))
