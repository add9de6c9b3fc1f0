"""b-values of every vendor's tag, the ADC fit against its closed form, and the units of ADC maps."""

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, add_private, header
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import ImplicitVRLittleEndian

from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.diffusion import adc_unit, b_value, fit_adc, gradient_direction


def dataset(**elements):
    ds = Dataset()
    for name, value in elements.items():
        setattr(ds, name, value)
    return ds


def private(tag, vr, value):
    return add_private(Dataset(), tag, vr, value)


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


@pytest.mark.parametrize("empty", [{"DiffusionBValue": None}, {"MRDiffusionSequence": Sequence([Dataset()])}])
def test_an_empty_public_tag_does_not_hide_the_vendor_s(empty):
    ds = private((0x0019, 0x100C), "IS", "800")
    ds.update(dataset(**empty))
    assert b_value(ds) == 800.0


@pytest.mark.parametrize(
    ("creators", "elements", "expected"),
    [
        (
            {(0x0019, 0x0010): "SIEMENS MR HEADER"},
            {(0x0019, 0x100C): ("IS", "1000"), (0x0019, 0x100E): ("FD", [0.0, 0.6, -0.8])},
            (1000.0, (0.0, 0.6, -0.8)),
        ),
        (
            {(0x0043, 0x0010): "GEMS_PARM_01", (0x0019, 0x0010): "GEMS_ACQU_01"},
            {(0x0043, 0x1039): ("IS", [1000000800, 8, 0, 0])}
            | {(0x0019, 0x10BB + n): ("DS", value) for n, value in enumerate(("0", "0.6", "-0.8"))},
            (800.0, (0.0, 0.6, -0.8)),
        ),
        (
            {(0x2001, 0x0010): "Philips Imaging DD 001", (0x2005, 0x0010): "Philips MR Imaging DD 001"},
            {(0x2001, 0x1003): ("FL", 800.0)}
            | {(0x2005, 0x10B0 + n): ("FL", value) for n, value in enumerate((0.0, 0.6, -0.8))},
            (800.0, (0.0, 0.6, -0.8)),
        ),
        (
            {(0x0065, 0x0010): "Image Private Header"},
            {(0x0065, 0x1009): ("FD", 929.75), (0x0065, 0x1037): ("FD", [0.0, 0.6, -0.8])},
            (950.0, (0.0, 0.6, -0.8)),
        ),
    ],
    ids=["siemens", "ge", "philips", "uih"],
)
def test_b_and_direction_of_each_vendor_in_implicit_vr(tmp_path, creators, elements, expected):
    """The file names no representation, and the reader keeps no private creator that would tell pydicom."""
    ds = header(Scan(np.ones((1, 4, 4), np.uint16), 1, "ep2d"), 0, "7")
    ds.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    for tag, creator in creators.items():
        ds.add_new(tag, "LO", creator)
    for tag, (vr, value) in elements.items():
        ds.add_new(tag, vr, value)
    ds.save_as(tmp_path / "1.dcm", enforce_file_format=True)
    ((found,),) = (study.headers for study in find_studies(tmp_path))
    assert (b_value(found), gradient_direction(found)) == expected


def volumes(adc, b_values, s0=1000.0):
    images = {}
    for b in b_values:
        images[b] = sitk.GetImageFromArray((s0 * np.exp(-b * adc * 1e-6)).astype(np.float32))
        images[b].SetSpacing((2.0, 2.0, 3.0))
    return images


@settings(max_examples=30)
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
    found, factor = adc_unit(image)
    assert found == unit
    assert factor * stored == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, 30.0, 50000.0, 0.05])
def test_no_unit_is_guessed_outside_the_ranges(value):
    image = sitk.GetImageFromArray(np.full((4, 8, 8), value, np.float32))
    with pytest.raises(StudyError, match="tissue median is") as error:
        adc_unit(image)
    assert error.value.code == "adc_units"
