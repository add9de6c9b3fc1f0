"""b-values of every vendor's tag, the ADC fit against its closed form, and the units of ADC maps."""

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from mri_alm.diffusion import adc_scale, adc_unit, b_value, fit_adc
from mri_alm.errors import StudyError


def dataset(**elements):
    ds = Dataset()
    for name, value in elements.items():
        setattr(ds, name, value)
    return ds


def private(tag, vr, value):
    ds = Dataset()
    ds.add_new(tag, vr, value)
    return ds


def emptied(tag, vr, value):
    """A public tag and a sequence that say nothing, beside a vendor's that does."""
    ds = private(tag, vr, value)
    ds.DiffusionBValue = None
    ds.MRDiffusionSequence = Sequence([dataset(DiffusionDirectionality="NONE")])
    return ds


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        (dataset(DiffusionBValue=800.0), 800.0),
        (dataset(MRDiffusionSequence=Sequence([dataset(DiffusionBValue=1400.0)])), 1400.0),
        (private((0x0019, 0x100C), "IS", "50"), 50.0),
        (private((0x0019, 0x100C), "UN", b"400 "), 400.0),
        (private((0x2001, 0x1003), "FL", 1000.0), 1000.0),
        (private((0x0043, 0x1039), "IS", [1000000800, 8, 0, 0]), 800.0),
        (private((0x0043, 0x1039), "IS", [1000, 8, 0, 0]), 1000.0),
        (private((0x0043, 0x1039), "UN", b"1000000050\\8\\0\\0"), 50.0),
        (private((0x0065, 0x1009), "FD", 929.7501831337527), 950.0),
        (private((0x0065, 0x1009), "UN", np.float64(1.25).tobytes()), 0.0),
        (private((0x2001, 0x1003), "UN", np.float32(800.0).tobytes()), 800.0),  # implicit VR: nobody says its kind
        (emptied((0x0019, 0x100C), "IS", "800"), 800.0),
        (Dataset(), None),
        (private((0x0019, 0x100C), "UN", b"none"), None),
        (private((0x0019, 0x100C), "IS", "-1"), None),
    ],
)
def test_b_value_of_each_vendor(ds, expected):
    assert b_value(ds) == expected


def test_public_tag_comes_before_a_private_one():
    ds = private((0x0043, 0x1039), "IS", [0, 8, 0, 0])
    ds.DiffusionBValue = 1000.0
    assert b_value(ds) == 1000.0


def volumes(adc, b_values, s0=1000.0):
    images = {}
    for b in b_values:
        images[b] = sitk.GetImageFromArray((s0 * np.exp(-b * adc * 1e-6)).astype(np.float32))
        images[b].SetSpacing((2.0, 2.0, 3.0))
    return images


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 50.0, 100.0, 400.0, 500.0, 800.0, 1400.0]), min_size=2, max_size=5, unique=True),
    st.integers(0, 99),
)
def test_fit_recovers_a_monoexponential_decay(b_values, seed):
    adc = np.random.default_rng(seed).uniform(200, 3000, (3, 4, 5))
    fitted = fit_adc(volumes(adc, b_values))
    np.testing.assert_allclose(sitk.GetArrayFromImage(fitted), adc, rtol=2e-2, atol=3)
    assert fitted.GetSpacing() == (2.0, 2.0, 3.0)


def test_fit_is_the_least_squares_line_of_the_logarithms():
    rng = np.random.default_rng(0)
    b = np.array([0.0, 100.0, 400.0, 800.0])
    signal = rng.uniform(50, 500, (4, 2, 3, 4)).astype(np.float32)
    slope = np.polyfit(b, np.log(signal.reshape(4, -1)), 1)[0].reshape(2, 3, 4)
    fitted = fit_adc({value: sitk.GetImageFromArray(s) for value, s in zip(b, signal, strict=True)})
    np.testing.assert_allclose(sitk.GetArrayFromImage(fitted), np.maximum(-1e6 * slope, 0), rtol=1e-4, atol=1e-2)


def test_fit_gives_zero_where_there_is_no_signal_and_never_infinity():
    images = volumes(np.full((2, 3, 4), 1000.0), (0.0, 800.0))
    for image in images.values():
        image[0, 0, 0] = 0.0
    images[800.0][1, 1, 1] = 0.0
    fitted = sitk.GetArrayFromImage(fit_adc(images))
    assert fitted[0, 0, 0] == 0.0
    assert np.isfinite(fitted).all()


def test_fit_needs_two_b_values():
    with pytest.raises(StudyError, match="needs two b-values, found") as error:
        fit_adc(volumes(np.full((2, 3, 4), 1000.0), (800.0,)))
    assert error.value.code == "adc_unfit"


@pytest.mark.parametrize(("stored", "unit"), [(1.0, "1e-6 mm2/s"), (1e-3, "1e-3 mm2/s"), (1e-6, "mm2/s")])
def test_units_of_an_adc_map_are_found_from_its_tissue(stored, unit):
    tissue = np.random.default_rng(0).uniform(800, 1800, (4, 8, 8))
    image = sitk.GetImageFromArray((tissue * stored).astype(np.float32))
    assert adc_unit(image) == unit
    assert adc_scale(image) * stored == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, 30.0, 50000.0, 0.05])
def test_no_unit_is_guessed_outside_the_ranges(value):
    image = sitk.GetImageFromArray(np.full((4, 8, 8), value, np.float32))
    with pytest.raises(StudyError, match="tissue median is") as error:
        adc_scale(image)
    assert error.value.code == "adc_units"
