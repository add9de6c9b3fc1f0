"""NIfTI (nibabel), MHA and NRRD (ITK) -> SimpleITK images, each header judged before a voxel is read; NIfTI out."""

import contextlib
import errno
import gzip
import io
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813
from nibabel.spatialimages import HeaderDataError
from numpy.typing import NDArray

from mri_alm.errors import StudyError, memory_ran_out
from mri_alm.imaging.dicom_files import silence_readers
from mri_alm.imaging.volume import MAX_VOXELS, SPACING_MM
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.files import in_utf8, open_file

# Threads that read images by ITK at once crash now and then (SimpleITK issue 74). nibabel needs no such lock.
ONE_IMAGE_FILE = threading.Lock()
SCALED_AT_ONCE = 1 << 22  # voxels: they take eight bytes meanwhile
DEFLATE_RATIO = 1100  # zlib never packs tighter than 1032 to 1
DETACHED = (".mhd", ".nhdr")  # headers whose voxels are in another file
BY_ITK = {
    **dict.fromkeys((".mha", ".mhd"), "MetaImageIO"),
    **dict.fromkeys((".nrrd", ".nhdr"), "NrrdImageIO"),
}  # anything else must be NIfTI, whatever its name
ENDINGS = (*BY_ITK, ".nii", ".gz", ".hdr", ".img")
LONGEST_HEADER = 1 << 20  # bytes
_ELSEWHERE = re.compile(rb"^[ \t]*(?:ElementDataFile[ \t]*=|data[ \t]?file[ \t]*:=?)[ \t]*(.*?)[ \t]*\r?$", re.I | re.M)
BYTES = (
    dict.fromkeys((sitk.sitkInt16, sitk.sitkUInt16), 2)
    | dict.fromkeys((sitk.sitkInt32, sitk.sitkUInt32, sitk.sitkFloat32), 4)
    | dict.fromkeys((sitk.sitkInt64, sitk.sitkUInt64, sitk.sitkFloat64), 8)
)
# Magic of a header -> the first byte that may be a voxel's in the same file; 0: they are in another.
_NIFTI = {b"n+1\0": 352, b"ni1\0": 0, b"n+2\0": 544, b"ni2\0": 0}
_TO_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # unit of a NIfTI header (unknown, m, mm, um) -> mm
_RAS_TO_LPS = np.array([-1.0, -1.0, 1.0])
# 32 bits of a quaternion near a half turn are off by up to 0.1 mm at a pelvis's rim; diffusion's voxels are 2 mm wide.
FORMS_APART_MM = 1.0
SHEAR_DEGREES = 0.1  # moves the rim of a pelvis by 0.2 mm; headers of 32 bits are off by 0.001
_GZIP = b"\x1f\x8b"
_NO_PLACE = "its voxel spacing is not 0.01 to 100 mm, or its origin no number"
PADDING = 512  # bytes after the voxels: some programs fill the last block
# What places an image by MHA's and NRRD's headers; of NRRD's spaces those whose axes ITK knows.
_PLACED = {
    "MetaImageIO": (
        rb"^[ \t]*(?:TransformMatrix|Rotation|Orientation)[ \t]*=",
        rb"^[ \t]*(?:Offset|Position|Origin)[ \t]*=",
    ),
    "NrrdImageIO": (
        rb"^space[ \t]*:[ \t]*(?:left-posterior-superior|(?:left|right)-anterior-superior|LPS|LAS|RAS)[ \t]*\r?$",
        rb"^space directions[ \t]*:",
        rb"^space origin[ \t]*:",
    ),
}
# A unit of length in an NRRD header that is not mm.
_FOREIGN_UNIT = re.compile(
    rb'^(?:space )?units[ \t]*:.*"[ \t]*([^m"\s]{0,2}m|in|(?:inch|met|cent|micro|nano)\w*)[ \t]*"', re.I | re.M
)
_VOXELS_FOLLOW = {".mha": rb"(?i)ElementDataFile[ \t]*=[ \t]*LOCAL[ \t]*\r?\n", ".nrrd": rb"\n\r?\n"}
_DEFLATED = re.compile(rb"^(?:CompressedData[ \t]*=[ \t]*True|encoding[ \t]*:[ \t]*gz)", re.I | re.M)
_OTHER_CODE = re.compile(
    rb"^(?:encoding[ \t]*:(?![ \t]*(?:raw|gz))|(?:byte|line) ?skip|HeaderSize|BinaryData[ \t]*=[ \t]*F)", re.I | re.M
)
# First bytes of what is found under the name of an image, and what to call it.
_OTHERS = {
    b"NRRD": "an NRRD file",
    b"ObjectType": "a MetaImage file",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x89HDF": "HDF5",
}


@dataclass(frozen=True)
class ImageHeader:
    """What a file says about its image, judged; its voxels are still unread.

    Args:
        name: The manifest's column, for messages.
        size: Three or four numbers of voxels; a fourth counts volumes.
        spacing: Of the first three axes, mm.
        origin: Centre of the first voxel, LPS mm.
        direction: Unit vectors of the three axes as columns (3, 3), LPS.
        placed: Whether the file says where the image lies; if not, origin and direction are placeholders.
        description: What the program that wrote a NIfTI file noted in it; never shown, it may name the patient.
        load: Reads the voxels: float32, volumes, slices, rows, columns.
    """

    name: str
    size: tuple[int, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    direction: NDArray[np.float64]
    placed: bool
    load: Callable[[], NDArray[np.float32]] = field(repr=False)
    description: str = field(default="", repr=False)

    @property
    def centre(self) -> NDArray[np.float64]:
        """Middle of the field of view, LPS mm."""
        half = (np.array(self.size[:3]) - 1) / 2 * self.spacing
        return np.asarray(self.origin + self.direction @ half)

    def read(self, *, mask: bool = False) -> sitk.Image:
        """The image, float32 with voxels as they are stored and scaled, also those that are no numbers.

        Args:
            mask: A mask may have one value everywhere.

        Raises:
            StudyError: ``empty_volume`` if all voxels have one value or none is finite; ``unreadable``.
        """
        voxels = self.load().reshape(self.size[::-1])
        finite = np.isfinite(voxels)
        low, high = voxels.min(where=finite, initial=np.inf), voxels.max(where=finite, initial=-np.inf)
        if low > high or (not mask and low == high):
            raise StudyError("empty_volume", f"Column {self.name}: every voxel has the same value, or none is finite.")
        image = sitk.GetImageFromArray(voxels, isVector=False)
        dimensions = len(self.size)
        direction = np.eye(dimensions)
        direction[:3, :3] = self.direction
        image.SetSpacing((*self.spacing, 1.0)[:dimensions])
        image.SetOrigin((*self.origin, 0.0)[:dimensions])
        image.SetDirection(direction.ravel().tolist())
        return image


def read_image(path: Path, name: str, *, mask: bool = False) -> sitk.Image:
    """A grey-scale image of three or four dimensions as float32 in LPS mm; voxels that are no numbers stay so.

    Args:
        path: NIfTI, MHA or NRRD; voxels apart from their header lie beside it.
        name: The manifest's column, for messages; the path may name the patient.
        mask: A mask may have one value everywhere.

    Raises:
        StudyError: As :func:`image_header`; ``empty_volume`` if all voxels have one value.
    """
    return image_header(path, name).read(mask=mask)


def image_header(path: Path, name: str) -> ImageHeader:
    """The header of an image file, read and judged before any voxel is.

    Args:
        path: As for :func:`read_image`.
        name: As for :func:`read_image`.

    Raises:
        StudyError: ``unreadable`` if it is no such image, its header claims more or less than the file holds, or it
            takes its voxels from another folder; ``not_3d``; ``geometry`` if its parts contradict one another or its
            axes are not perpendicular; ``no_position`` for Analyze files.
    """
    silence_readers()
    if not in_utf8(path):  # ITK ends the process over it
        raise StudyError("unreadable", f"Column {name}: a name in its path is not in UTF-8. Rename it.")
    with _reading(path, name):
        open_file(path).close()  # ITK would wait for the writer of a named pipe
    if not all(_lies_beside(file, path) for file in _named_voxels(path)):  # it could name any file there is
        raise _unreadable(name, "its voxels are not in one file beside its header")
    return (_itk_header if path.suffix.lower() in BY_ITK else _nifti_header)(path, name)


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """A reader at a file; its errors without their text, which holds the path."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise _unreadable(name, f"{_kind(path)} is cut short or damaged") from None
    except (RuntimeError, OSError, MemoryError) as error:
        raise memory_ran_out(error) or _unreadable(name, _no_image(path)) from None


def _no_image(path: Path) -> str:
    return f"{_kind(path)} is no image that can be read"


def _unreadable(name: str, problem: str) -> StudyError:
    return StudyError("unreadable", f"Column {name}: {problem}. Export it again.")


def _kind(path: Path) -> str:
    """A file by its format; any other ending may be part of a patient's name."""
    if path.suffix.lower() in ENDINGS:
        return f"the {path.suffix.lower()} file"
    return "a file that is no NIfTI, MHA or NRRD (of DICOM give a folder)"


def voxels_of(image: Path) -> list[Path]:
    """The files beside a header that hold its voxels; none where it holds them itself or names another place."""
    return [file for file in _named_voxels(image) if file != image and _lies_beside(file, image)]


def _lies_beside(file: Path, image: Path) -> bool:
    return file.is_file() and file.resolve().parent == image.parent.resolve()


def _named_voxels(path: Path) -> list[Path]:
    """What a header names as the place of its voxels, wherever that is; empty when they are in the same file."""
    if path.suffix.lower() in (".hdr", ".img"):
        return [path.with_suffix(ending) for ending in (".hdr", ".img")]
    if path.suffix.lower() not in BY_ITK or not path.is_file():
        return []
    header = _text(path)
    found = {match.decode("latin-1") for match in _ELSEWHERE.findall(header)}
    needed = path.suffix.lower() != ".nrrd" or len(header) == LONGEST_HEADER
    return [path.parent / file for file in (sorted(found - {"LOCAL"}) if found or not needed else ["?"])]


def _text(path: Path) -> bytes:
    """The header of an MHA or NRRD file; of MHA with voxels behind it."""
    with open_file(path) as stream:
        header = stream.read(LONGEST_HEADER)
    nrrd = path.suffix.lower() in (".nrrd", ".nhdr")
    return re.split(rb"\r?\n\r?\n", header, maxsplit=1)[0] if nrrd else header


def _judged(header: ImageHeader) -> ImageHeader:
    """A header whose grid is a place in space, its axes perpendicular to the last bit, without trailing axes of one.

    Raises:
        StudyError: ``not_3d``, ``unreadable`` or ``geometry``.
    """
    name, size, (low, high) = header.name, header.size, SPACING_MM
    while len(size) > 3 and size[-1] == 1:
        size = size[:-1]
    if len(size) not in (3, 4) or min(size) < 1:
        what = " x ".join(map(str, size))
        raise StudyError("not_3d", f"Column {name}: an image of {what} voxels; three dimensions are needed, or four.")
    if (voxels := math.prod(size)) > MAX_VOXELS:
        raise _unreadable(name, f"its header claims {voxels:,} voxels")
    if not all(map(math.isfinite, header.origin)) or not all(low <= mm <= high for mm in header.spacing):
        raise _unreadable(name, _NO_PLACE)
    direction = _perpendicular(header.direction, name)
    # What nibabel and SimpleITK give to a bare array; no scanner's image lies there.
    lost = set(header.spacing) == {1.0} and not any(header.origin) and np.array_equal(np.abs(direction), np.eye(3))
    return replace(header, size=size, direction=direction, placed=header.placed and not lost)


def _perpendicular(direction: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """The nearest axes that are perpendicular unit vectors, if a header's are that but for rounding.

    Raises:
        StudyError: ``geometry``.
    """
    gram = direction.T @ direction
    if not np.isfinite(gram).all() or not np.allclose(np.diag(gram), 1.0, atol=1e-3):
        raise StudyError("geometry", f"Column {name}: the directions of its axes are no unit vectors. Export it again.")
    shear = float(np.degrees(np.arcsin(min(1.0, np.abs(gram - np.diag(np.diag(gram))).max()))))
    if shear > SHEAR_DEGREES:
        raise StudyError(
            "geometry",
            f"Column {name}: its axes are not perpendicular (sheared by {shear:.2g} degrees), as some registration "
            "programs write it. Give the image before that, or resample it onto a grid with perpendicular axes.",
        )
    if np.allclose(gram, np.eye(3), rtol=0, atol=1e-6):  # but for the rounding of 32 bits
        return direction
    left, _, right = np.linalg.svd(direction)
    return np.asarray(left @ right)


def _itk_header(path: Path, name: str) -> ImageHeader:
    """Of an MHA or NRRD file."""
    ending = path.suffix.lower()
    reader = sitk.ImageFileReader()
    reader.SetImageIO(BY_ITK[ending])
    reader.SetFileName(str(path))
    with _reading(path, name), ONE_IMAGE_FILE:
        reader.ReadImageInformation()
    size, components = reader.GetSize(), reader.GetNumberOfComponents()
    claimed = math.prod(size) * components * BYTES.get(reader.GetPixelID(), 1)
    if ending not in DETACHED and claimed > path.stat().st_size * DEFLATE_RATIO:
        raise _unreadable(name, f"its header claims {claimed:,} bytes of voxels, more than the file can hold")
    if components != 1:
        raise _unreadable(name, "it is a colour or vector image")
    text = _text(path)
    if ending in (".nrrd", ".nhdr") and (unit := _FOREIGN_UNIT.search(text)):
        raise _unreadable(name, f"its unit of length is {unit[1].decode('latin-1')}, not mm")
    placed = all(re.search(pattern, text, re.I | re.M) for pattern in _PLACED[BY_ITK[ending]])
    direction = np.array(reader.GetDirection()).reshape(len(size), -1)[:3, :3]
    reader.SetOutputPixelType(sitk.sitkFloat32)

    def load() -> NDArray[np.float32]:
        if not _holds(path, text, claimed):
            raise _unreadable(name, f"{_kind(path)} holds more voxels than its header says, or is cut short or damaged")
        with _reading(path, name), ONE_IMAGE_FILE:
            image = reader.Execute()
        return sitk.GetArrayFromImage(image)

    header = ImageHeader(name, size, reader.GetSpacing()[:3], reader.GetOrigin()[:3], direction, placed, load)
    return _judged(header)


def _holds(path: Path, text: bytes, claimed: int) -> bool:
    """Whether the voxels behind the header of an MHA or NRRD file are as many as it claims, and pass zlib's check.

    ITK takes the first ones of more, so that a wrong size shears the image, and what zlib gives of a damaged stream.
    """
    if _named_voxels(path) or _OTHER_CODE.search(text):
        return True
    with open_file(path) as stream:
        start = re.search(_VOXELS_FOLLOW[path.suffix.lower()], stream.read(LONGEST_HEADER))
        stream.seek(start.end() if start else 0)
        if not _DEFLATED.search(text):
            return 0 <= path.stat().st_size - stream.tell() - claimed <= PADDING
        inflate, found = zlib.decompressobj(47), 0  # a stream of zlib or gzip
        with contextlib.suppress(zlib.error):
            while found <= claimed and not inflate.eof and (part := inflate.unconsumed_tail or stream.read(1 << 20)):
                found += len(inflate.decompress(part, 1 << 22))
        return inflate.eof and found == claimed


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """A file's content, inflated where it is gzip, whatever its name says."""
    with open_file(path) as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream
        else:
            yield raw


def _nifti_header(path: Path, name: str) -> ImageHeader:
    """Of a NIfTI file of either version, or of a pair of .hdr and .img."""
    header, first = _parsed(path.with_suffix(".hdr") if path.suffix.lower() == ".img" else path, name)
    size = tuple(int(n) for n in header["dim"][1 : 1 + int(header["dim"][0])])
    dtype = _dtype(header, name)
    place, start = (path, first) if first else (path.with_suffix(".img"), 0)
    if (offset := float(header["vox_offset"])) and not start <= offset <= LONGEST_HEADER:
        raise _unreadable(name, f"its header says that its voxels begin at byte {offset:g}")
    start, length = max(start, int(offset)), math.prod(size) * dtype.itemsize
    _check_claim(place, start, length, name)
    slope, shift = _scale(header, name)
    spacing, affine, placed = _affine(header, size, name)

    def load() -> NDArray[np.float32]:
        with _reading(place, name), np.errstate(over="ignore", invalid="ignore"):
            voxels = np.frombuffer(_content(place, start, length, name), dtype)
            scaled = voxels.astype(np.float32)
            for n in range(0, 0 if (slope, shift) == (1.0, 0.0) else voxels.size, SCALED_AT_ONCE):
                scaled[n : n + SCALED_AT_ONCE] = voxels[n : n + SCALED_AT_ONCE] * slope + shift
            return scaled

    direction = affine[:3, :3] / np.maximum(np.linalg.norm(affine[:3, :3], axis=0), 1e-30)
    note = bytes(header["descrip"].item()).decode("latin-1")
    return _judged(ImageHeader(name, size, spacing, tuple(affine[:3, 3].tolist()), direction, placed, load, note))


def _parsed(path: Path, name: str) -> tuple[Any, int]:
    """The header as nibabel has it, and the first byte that may be a voxel's; 0 where they are in another file."""
    with _reading(path, name), _opened(path) as stream:
        start = stream.read(540)
    order = "<" if start[1:2] != b"\0" else ">"
    kind, magic = {
        b"\x5c\1\0\0": (nib.Nifti1Header, start[344:348]),
        b"\x1c\2\0\0": (nib.Nifti2Header, start[4:8]),
    }.get(start[:4] if order == "<" else start[3::-1], (None, b""))
    if kind is None or len(start) < kind.template_dtype.itemsize:
        inside = next((what for mark, what in _OTHERS.items() if start.startswith(mark)), "")
        inside = "DICOM" if start[128:132] == b"DICM" else inside
        raise _unreadable(name, f"{_kind(path)} holds {inside} instead of NIfTI" if inside else _no_image(path))
    header = kind(start[: kind.template_dtype.itemsize], endianness=order, check=False)
    if not 1 <= header["dim"][0] <= 7:
        raise _unreadable(name, _no_image(path))
    if magic not in _NIFTI:
        raise StudyError(
            "no_position",
            f"Column {name}: {_kind(path)} is Analyze 7.5, which does not say where its image lies, or its NIfTI mark "
            "is damaged. Convert the images from DICOM to NIfTI again.",
        )
    if not _NIFTI[magic] and path.suffix.lower() != ".hdr":
        raise _unreadable(name, "its header is half of a pair (.hdr and .img), but has another name")
    return header, _NIFTI[magic]


def _dtype(header: Any, name: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = header.get_data_dtype()
    except (HeaderDataError, KeyError):
        raise _unreadable(name, f"its header gives its voxels the unknown type {header['datatype']}") from None
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise _unreadable(name, "it is a colour, complex or vector image")
    if header["bitpix"] != 8 * dtype.itemsize:
        raise _unreadable(name, f"its header gives {header['bitpix']} bits to voxels of {8 * dtype.itemsize}")
    return dtype


def _scale(header: Any, name: str) -> tuple[float, float]:
    """Slope and intercept of the stored numbers; a slope of zero, or NaN as nibabel writes it, means none.

    With such a slope ITK adds an intercept and nibabel does not: that could be read two ways.
    """
    slope, shift = float(header["scl_slope"]), float(header["scl_inter"])
    none = slope == 0 or math.isnan(slope)
    if none and (shift == 0 or math.isnan(shift)):
        return 1.0, 0.0
    if none or not math.isfinite(slope) or not math.isfinite(shift):
        raise _unreadable(name, f"its scale is none (scl_slope {slope:g}, scl_inter {shift:g})")
    return slope, shift


def _affine(header: Any, size: Sequence[int], name: str) -> tuple[tuple[float, ...], NDArray[np.float64], bool]:
    """Spacing in mm, voxels to LPS mm, and whether the header says it: by sform, else by qform, or by neither.

    Raises:
        StudyError: ``geometry`` where what it says does not fit together.
    """
    unit = _TO_MM.get(int(header["xyzt_units"]) & 7, math.nan)
    pixdim = header["pixdim"][1:4].astype(np.float64)
    if not (pixdim > 0).all():
        raise _unreadable(name, _NO_PLACE)
    forms = _forms(header, pixdim, name)
    # By neither, the axes are as ITK takes them: to the left, to the back, up.
    first, affine = next(iter(forms.items()), ("", np.diag([*(pixdim * _RAS_TO_LPS), 1.0])))
    ends = [(0, n - 1) for n in (*size, 1, 1)[:3]]
    corners = np.stack(np.meshgrid(*ends, (1,)), axis=-1).reshape(-1, 4)
    for form, other in forms.items():
        apart = unit * float(np.linalg.norm(corners @ (affine - other).T, axis=1).max())
        if apart > FORMS_APART_MM:
            raise StudyError(
                "geometry",
                f"Column {name}: {first} and {form} of its header place the image up to {apart:.1f} mm apart, so "
                "one of them is wrong. Convert it from DICOM again, or set both to the right one.",
            )
    lps = np.diag([*(unit * _RAS_TO_LPS), 1.0]) @ affine
    return tuple((unit * pixdim).tolist()), lps, bool(forms)


def _forms(header: Any, pixdim: NDArray[np.float64], name: str) -> dict[str, NDArray[np.float64]]:
    """What a NIfTI header says of the place of its voxels, each as an affine, the one to take first."""
    forms: dict[str, NDArray[np.float64]] = {}
    if header["sform_code"] > 0:
        sform = header.get_sform()
        norms = np.maximum(np.linalg.norm(sform[:3, :3], axis=0), 1e-30)
        forms = {"sform": sform, "pixdim": sform * [*(pixdim / norms), 1.0]}
    if header["qform_code"] > 0:
        header["pixdim"][0] = -1.0 if header["pixdim"][0] < 0 else 1.0  # as NIfTI's own library takes zero
        try:
            forms["qform"] = header.get_qform()
        except (HeaderDataError, ValueError):
            raise StudyError("geometry", f"Column {name}: its qform is no rotation. Export it again.") from None
    return forms


def _check_claim(place: Path, start: int, length: int, name: str) -> None:
    """Refuse what a header claims but no file of this size can hold."""
    with _reading(place, name), open_file(place) as stream:
        available = place.stat().st_size * (DEFLATE_RATIO if stream.read(2) == _GZIP else 1)
    if start + length > available:
        raise _unreadable(name, f"its header claims {length:,} bytes of voxels, more than the file can hold")


def _content(place: Path, start: int, length: int, name: str) -> bytes:
    """The voxels of a NIfTI file; nothing behind them is inflated, and where the file ends, gzip's CRC is compared."""
    with _opened(place) as stream:
        stream.seek(start)
        content = stream.read(length)
        rest = stream.read(PADDING + 1)
    if len(content) < length:
        raise EOFError
    if len(rest) > PADDING:
        raise _unreadable(name, "its file holds more voxels than its header says")
    return content


def write_nifti(path: Path, image: sitk.Image) -> None:
    """Write a compressed NIfTI file; equal images give equal files.

    Raises:
        InputError: If the disk is full or the place cannot be written.
    """
    voxels = image.GetNumberOfPixels() * image.GetNumberOfComponentsPerPixel() * image.GetSizeOfPixelComponent()
    with write_atomically(path) as part:
        plain = part.with_suffix("")
        try:
            with ONE_IMAGE_FILE:
                sitk.WriteImage(image, str(plain))
        except RuntimeError as error:  # SimpleITK's only kind
            raise OSError(errno.EIO, "the NIfTI writer failed") from error
        if plain.stat().st_size < _NIFTI[b"n+1\0"] + voxels:  # ITK does not notice a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Level 1 is four times as fast as the default and 5 % larger; no time stamp: equal images are equal files.
        part.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=1, mtime=0))
