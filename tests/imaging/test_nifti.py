"""NIfTI headers: what says where an image lies, which numbers its voxels are, and what is refused by name."""

import gzip
import struct

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from scipy.spatial.transform import Rotation

from mri_alm.errors import StudyError
from mri_alm.imaging.image_file import image_header, read_image

RNG = np.random.default_rng(0)
VOXELS = RNG.integers(0, 900, (10, 8, 6)).astype(np.int16)
SPACING = 2.0, 1.5, 3.0
SCALES = (0, 0), (1, 0), (np.nan, np.nan), (2.5e-5, 0), (1.7, -5), (-1, 900)
CODES = (1, 1), (1, 0), (0, 1), (2, 2), (0, 2), (2, 1), (4, 0), (1, 2)


def affine_of(angles=(0, 0, 0), spacing=SPACING, origin=(-10, -20, 30)):
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", angles, degrees=True).as_matrix() @ np.diag(spacing)
    affine[:3, 3] = origin
    return affine


def stored(path, voxels=VOXELS, *, qform=None, sform=None, codes=(1, 1), kind=nibabel.Nifti1Image, **fields):
    """Any header, byte for byte; forms are RAS."""
    affine = affine_of()
    header = kind.header_class(endianness=fields.pop("order", "<"))
    header.set_data_dtype(voxels.dtype)
    header.set_data_shape(voxels.shape)
    header.set_qform(affine if qform is None else qform, 1)
    header.set_sform(affine if sform is None else sform, 1)
    header["qform_code"], header["sform_code"] = codes
    header["vox_offset"] = header.single_vox_offset
    content = voxels.astype(header.get_data_dtype()).tobytes("F")
    for name, value in fields.items():
        header[name] = value
    data = header.binaryblock + bytes(4) + content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def voxels_of(image):
    return sitk.GetArrayFromImage(image).T


def refused(path, match, code="unreadable"):
    with pytest.raises(StudyError, match=match) as error:
        image_header(path, "t2")
    assert error.value.code == code
    assert "SECRET" not in error.value.message
    assert str(path.parent) not in error.value.message


@pytest.mark.parametrize("seed", range(60))
def test_sound_files_are_what_simpleitk_makes_of_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    dtype = rng.choice(["i2", "u2", "f4", "f8", "u1", "i4", "u4"])
    shape = tuple(rng.integers(2, 9, 3)) + ((3,) if seed % 3 == 0 else ())
    affine = affine_of(rng.uniform(-180, 180, 3), rng.uniform(0.3, 5, 3), rng.uniform(-200, 200, 3))
    affine[:, 0] *= rng.choice([-1, 1])  # radiological or neurological
    path = stored(
        tmp_path / ("x.nii" if seed % 2 else "x.nii.gz"),
        rng.uniform(0, 250, shape).astype(dtype),
        qform=affine,
        sform=affine,
        codes=CODES[seed % len(CODES)],
        order=rng.choice(["<", ">"]),
        **dict(zip(("scl_slope", "scl_inter"), SCALES[seed % len(SCALES)], strict=True)),
        xyzt_units=rng.choice([0, 2, 10]),
    )
    ours, theirs = read_image(path, "t2"), sitk.ReadImage(str(path), sitk.sitkFloat32)
    np.testing.assert_array_equal(voxels_of(ours), voxels_of(theirs))
    assert (ours.GetSize(), ours.GetSpacing()[:3]) == (theirs.GetSize(), theirs.GetSpacing()[:3])
    np.testing.assert_allclose(ours.GetOrigin()[:3], theirs.GetOrigin()[:3], rtol=0, atol=1e-9)
    np.testing.assert_allclose(ours.GetDirection(), theirs.GetDirection(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("order", ["<", ">"])
def test_version_2_is_read_too(tmp_path, order):
    affine = affine_of((10, 20, 30))
    path = stored(tmp_path / "x.nii.gz", qform=affine, sform=affine, kind=nibabel.Nifti2Image, order=order)
    image = read_image(path, "t2")
    np.testing.assert_array_equal(voxels_of(image), VOXELS)
    corner = np.diag([-1, -1, 1]) @ (affine @ [9, 7, 5, 1])[:3]
    np.testing.assert_allclose(image.TransformIndexToPhysicalPoint((9, 7, 5)), corner, atol=1e-5)


def test_gzip_is_known_by_its_first_bytes_and_a_file_has_its_own_voxels(tmp_path):
    """ITK reads the voxels of x.nii for x.nii.gz where both lie in one folder."""
    path = stored(tmp_path / "x.nii.gz")
    (tmp_path / "packed.nii").write_bytes(path.read_bytes())
    (tmp_path / "plain.nii.gz").write_bytes(gzip.decompress(path.read_bytes()))
    stored(tmp_path / "x.nii", VOXELS + 7)
    for name, more in (("packed.nii", 0), ("plain.nii.gz", 0), ("x.nii.gz", 0), ("x.nii", 7)):
        np.testing.assert_array_equal(voxels_of(read_image(tmp_path / name, "t2")), VOXELS + more)


@pytest.mark.parametrize("codes", [(1, 1), (0, 2), (3, 0), (1, 4)])
def test_two_forms_that_contradict_one_another_are_refused(tmp_path, codes):
    moved = affine_of(origin=(-10, -20, 38))
    path = stored(tmp_path / "x.nii", sform=moved, codes=codes)
    if 0 in codes:  # one of them alone is believed
        assert image_header(path, "t2").origin == pytest.approx((10, 20, 38 if codes[1] else 30))
    else:
        refused(path, r"sform and qform of its header place the image up to 8\.0 mm apart", "geometry")


def test_rounding_is_no_contradiction(tmp_path):
    near = affine_of((0.3, 0, 0), origin=(-10, -20, 30.2))
    assert image_header(stored(tmp_path / "x.nii", sform=near), "t2").origin == pytest.approx((10, 20, 30.2))


def test_an_sform_with_another_voxel_size_is_refused(tmp_path):
    path = stored(tmp_path / "x.nii", sform=affine_of(spacing=(2, 1.5, 3.3)), codes=(0, 1))
    refused(path, r"sform and pixdim of its header place the image up to 1\.5 mm apart", "geometry")


def test_shear_is_refused_and_rounding_made_perpendicular(tmp_path):
    sheared = affine_of()
    sheared[0, 1] = 0.05
    path = stored(tmp_path / "x.nii", sform=sheared, codes=(0, 2))
    refused(path, r"its axes are not perpendicular \(sheared by 1\.9 degrees\)", "geometry")
    sheared[0, 1] = 0.002
    direction = image_header(stored(tmp_path / "x.nii", sform=sheared, codes=(0, 2)), "t2").direction
    np.testing.assert_allclose(direction.T @ direction, np.eye(3), atol=1e-12)
    assert np.abs(direction - np.diag([-1, -1, 1])).max() == pytest.approx(0.002 / 1.5 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "placed"),
    [
        ({"codes": (0, 0)}, False),
        ({"codes": (0, 1)}, True),
        ({"codes": (1, 0)}, True),
        ({"qform": np.eye(4), "sform": np.eye(4)}, False),
        ({"qform": np.diag([-1, -1, 1, 1]), "sform": np.diag([-1, -1, 1, 1])}, False),  # SimpleITK's
        ({"qform": np.diag([2, 1.5, 3, 1]), "sform": np.diag([2, 1.5, 3, 1])}, True),
    ],
)
def test_what_says_where_an_image_lies(tmp_path, fields, placed):
    assert image_header(stored(tmp_path / "x.nii", **fields), "t2").placed is placed


@pytest.mark.parametrize(("unit", "factor"), [(1, 1e-3), (3, 1e3)])
def test_metres_and_microns_become_millimetres(tmp_path, unit, factor):
    affine = affine_of((0, 0, 40), np.array(SPACING) * factor, np.array([-10, -20, 30]) * factor)
    header = image_header(stored(tmp_path / "x.nii", qform=affine, sform=affine, xyzt_units=unit), "t2")
    assert header.spacing == pytest.approx(SPACING)
    assert header.origin == pytest.approx((10, 20, 30))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"xyzt_units": 5}, "its voxel spacing is not 0.01 to 100 mm"),
        ({"pixdim": [1, -2, 1.5, 3, 1, 1, 1, 1], "codes": (1, 0)}, "its voxel spacing is not 0.01 to 100 mm"),
        ({"pixdim": [1, 0, 1.5, 3, 1, 1, 1, 1], "codes": (1, 0)}, "its voxel spacing is not 0.01 to 100 mm"),
        ({"qoffset_x": np.nan, "codes": (1, 0)}, "or its origin no number"),
        ({"bitpix": 32}, "its header gives 32 bits to voxels of 16"),
        ({"datatype": 777}, "its header gives its voxels the unknown type 777"),
        ({"datatype": 128, "bitpix": 24}, "it is a colour, complex or vector image"),
        ({"datatype": 32, "bitpix": 64}, "it is a colour, complex or vector image"),
        ({"scl_slope": np.inf}, r"its scale is none \(scl_slope inf, scl_inter 0\)"),
        ({"scl_slope": 0, "scl_inter": 5}, r"its scale is none \(scl_slope 0, scl_inter 5\)"),
        ({"scl_slope": 2, "scl_inter": np.nan}, r"its scale is none \(scl_slope 2, scl_inter nan\)"),
        ({"vox_offset": 40}, "its header says that its voxels begin at byte 40"),
        ({"vox_offset": np.nan}, "its header says that its voxels begin at byte nan"),
        ({"vox_offset": 400}, "its header claims 960 bytes of voxels, more than the file can hold"),
        ({"magic": b"ni1"}, r"its header is half of a pair \(.hdr and .img\)"),
    ],
)
def test_headers_that_cannot_be_right_are_refused_by_name(tmp_path, fields, match):
    refused(stored(tmp_path / "x.nii", **fields), f"^Column t2: .*{match}")


@pytest.mark.parametrize("quaternion", [(0.9, 0.9, 0.9), (np.nan, 0, 0)])
def test_a_quaternion_that_is_no_rotation_is_refused(tmp_path, quaternion):
    path = stored(tmp_path / "x.nii", codes=(1, 0))
    data = bytearray(path.read_bytes())
    data[256:268] = struct.pack("<3f", *quaternion)
    path.write_bytes(bytes(data))
    refused(path, "its qform is no rotation|directions of its axes are no unit vectors", "geometry")


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((10, 8, 6, 1), (10, 8, 6)),
        ((10, 8, 6, 1, 1), (10, 8, 6)),
        ((5, 4, 6, 4, 1), (5, 4, 6, 4)),
        ((80, 6), None),
        ((10, 8, 2, 1, 3), None),
        ((1, 1, 1, 1, 60, 8), None),  # CIFTI
    ],
)
def test_axes_of_one_at_the_end_are_dropped_and_vectors_refused(tmp_path, shape, size):
    path = stored(tmp_path / "x.nii", VOXELS.reshape(shape))
    if size:
        image = read_image(path, "t2")
        assert image.GetSize() == size
        np.testing.assert_array_equal(voxels_of(image), VOXELS.reshape(size))
    else:
        what = " x ".join(map(str, shape))
        refused(path, f"an image of {what} voxels; three dimensions are needed, or four", "not_3d")


def test_a_pair_is_read_and_analyze_refused(tmp_path):
    data = stored(tmp_path / "x.nii", magic=b"ni1", vox_offset=0).read_bytes()
    (tmp_path / "x.hdr").write_bytes(data[:348])
    for name, voxels in (("x.img", data[352:]), ("x.img", gzip.compress(data[352:]))):
        (tmp_path / name).write_bytes(voxels)
        for given in ("x.hdr", "x.img"):
            np.testing.assert_array_equal(voxels_of(read_image(tmp_path / given, "t2")), VOXELS)
    (tmp_path / "x.hdr").write_bytes(data[:344] + bytes(4))
    refused(
        tmp_path / "x.hdr", r"the \.hdr file is Analyze 7\.5, which does not say where its image lies", "no_position"
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"NRRD0004\n" + bytes(600), r"the \.gz file holds an NRRD file instead of NIfTI"),
        (bytes(128) + b"DICM" + bytes(600), r"the \.gz file holds DICOM instead of NIfTI"),
        (b"ObjectType = Image\n" + bytes(600), r"the \.gz file holds a MetaImage file instead of NIfTI"),
        (b"\x1f\x8b" + bytes(600), r"the \.gz file is cut short or damaged"),
        (b"", r"the \.gz file is no image that can be read"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_what_a_file_holds_instead_is_named(tmp_path, content, match, packed):
    (tmp_path / "SECRET.nii.gz").write_bytes(gzip.compress(content) if packed and content[:1] != b"\x1f" else content)
    refused(tmp_path / "SECRET.nii.gz", match)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_file_that_is_cut_short_is_refused(tmp_path, share):
    path = stored(tmp_path / "x.nii.gz", RNG.integers(0, 900, (30, 30, 20)).astype(np.int16))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(StudyError, match=r"Column t2: the \.gz file is cut short or damaged"):
        read_image(path, "t2")
