"""Small files that claim, or unpack to, more than any exam or model: refused before memory is spent on them."""

import gzip
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from conftest import ROOT
from dicom_writer import Scan, header, save_enhanced, write, write_enhanced
from exams import scans
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import RLELossless
from safetensors import SafetensorError
from safetensors.torch import load, save

import mri_alm.imaging.volume
from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.bundle.trained_run import load_member
from mri_alm.cifar.archive import load_arrays
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import load_images, read_series, read_study
from mri_alm.imaging.image_file import image_header
from mri_alm.imaging.volume import MAX_VOXELS
from mri_alm.runtime.files import DamagedFileError

# --- Images ---------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from pathlib import Path
from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import read_study

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak()
try:
    read_study(find_studies(Path(sys.argv[1]))[0])
except StudyError as error:
    print(error.code, error)
print(peak() - before)
"""


def write_rle(folder: Path, *scans: Scan, side: int) -> Path:
    """Every slice of every scan as one RLE file of ``side`` x ``side`` pixels: two squares, 15 to 20 kB a megapixel."""
    pixels = np.zeros((1, side, side), np.uint16)
    pixels[0, : side // 2, : side // 2] = 900
    packed = header(scans[0].but(pixels=pixels), 0, "7")
    packed.compress(RLELossless)
    folder.mkdir(parents=True)
    for scan in scans:
        for index in range(len(scan.pixels)):
            ds = header(scan, index, "7")
            ds.Rows = ds.Columns = side
            ds.file_meta.TransferSyntaxUID, ds.PixelData = RLELossless, packed.PixelData
            ds["PixelData"].is_undefined_length = True
            ds.save_as(folder / f"{scan.number}_{index}.dcm", enforce_file_format=True)
    return folder


def test_a_study_of_megabytes_that_unpacks_to_gigabytes_is_refused_before_a_pixel_is(tmp_path: Path) -> None:
    """Five series of six slices of 2,048 x 2,048: 126 million voxels in half a megabyte a slice or less."""
    folder = write_rle(tmp_path / "in", *scans(0), side=2048)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6
    done = subprocess.run([sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True, cwd=ROOT)
    refusal, grown = done.stdout.splitlines()
    assert refusal == (
        "too_large The headers of 5 series claim 125,829,120 voxels, and an exam has 67,108,864 at most. The largest "
        "is series 4: 6 images of 2048 x 2048 pixels. Leave it out of the export, export it with fewer or smaller "
        "images, or name the right series for this study in the rules file."
    )
    assert int(grown) < 500  # MB; the T2 alone is read, 100 MB as float32. All of it took 2,400


@pytest.mark.parametrize("limit", [30 * 400, 30 * 400 - 1])
def test_the_bound_is_of_all_series_that_are_used_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    (study,) = find_studies(write(tmp_path / "in", *scans(0)))  # five series of six slices of 20 x 20
    monkeypatch.setattr(mri_alm.imaging.volume, "MAX_VOXELS", limit)
    if limit == 30 * 400:
        assert read_study(study).t2.GetSize() == (20, 20, 6)
        return
    with pytest.raises(StudyError, match=r"of 5 series claim 12,000 voxels, and an exam has 11,999 at most") as error:
        read_study(study)
    assert error.value.code == "too_large"


def test_a_series_too_large_by_itself_gives_way_to_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t2, *diffusion = scans(0)
    large = t2.but(pixels=np.tile(t2.pixels, (1, 8, 8)), number=3, spacing=(0.25, 0.25, 3.0))
    (study,) = find_studies(write(tmp_path / "in", large, t2, *diffusion))
    monkeypatch.setattr(mri_alm.imaging.volume, "MAX_VOXELS", 30 * 400)
    exam = read_study(study)
    assert exam.info["t2"]["series"] == 4
    assert any(text.startswith("series 3 left out: The headers of 1 series claim 153,600") for text in exam.warnings)


def test_nameless_series_are_bounded_before_their_content_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless = [one.but(description="") if one.number > 4 else one for one in scans(0)]
    (study,) = find_studies(write(tmp_path / "in", *nameless))
    monkeypatch.setattr(mri_alm.imaging.volume, "MAX_VOXELS", 2399)
    monkeypatch.setattr(mri_alm.imaging.volume, "_pixels", lambda *_: pytest.fail("a pixel was decoded"))
    with pytest.raises(StudyError, match="voxels, and an exam has 2,399 at most"):
        read_study(study)


def test_a_folder_of_one_series_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "in", scans(0)[0])
    monkeypatch.setattr(mri_alm.imaging.volume, "MAX_VOXELS", 2399)
    with pytest.raises(StudyError, match="largest is series 4: 6 images of 20 x 20 pixels") as error:
        read_series(folder)
    assert error.value.code == "too_large"


def test_one_slice_is_no_picture_of_the_moon(tmp_path: Path) -> None:
    """A decoder may take seventy times what one slice of run lengths needs."""
    folder = write_rle(tmp_path / "in", scans(0)[0].but(pixels=np.zeros((2, 20, 20), np.uint16)), side=2049)
    with pytest.raises(StudyError, match=r"2 slices of \(2049, 2049\) pixels are no MR volume"):
        read_series(folder)


def test_run_lengths_beyond_their_image_are_not_unpacked(tmp_path: Path) -> None:
    folder = write_rle(tmp_path / "in", scans(0)[0], side=64)
    (file, *_) = sorted(folder.iterdir())
    ds = header(scans(0)[0], 0, "7")
    ds.Rows = ds.Columns = 64
    segment = b"\x81\x00" * 20_000  # 128 zeros each: 2.5 MB where 4 kB are needed
    frame = struct.pack("<16L", 2, 64, 64 + len(segment), *[0] * 13) + 2 * segment
    ds.file_meta.TransferSyntaxUID, ds.PixelData = RLELossless, encapsulate([frame])
    ds["PixelData"].is_undefined_length = True
    ds.save_as(file, enforce_file_format=True)
    with pytest.raises(StudyError, match="holds more run lengths than its image can need"):
        read_series(folder)


@pytest.mark.parametrize("packed", [False, True])
def test_of_an_enhanced_file_only_the_frames_in_use_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """The same voxels as from classic files, and each frame decoded once."""
    low, high = scans(0)[1:3]
    every = [header(one, index, "7") for one in (low, high) for index in range(6)]
    for ds, b in zip(every, [50.0] * 6 + [800.0] * 6, strict=True):
        ds.DiffusionBValue = b
    order = np.random.default_rng(0).permutation(12)
    path = save_enhanced(tmp_path / "in" / "x.dcm", header(low, 0, "7"), [every[n] for n in order])
    if packed:
        ds = pydicom.dcmread(path)
        ds.compress(RLELossless)
        ds.save_as(path)
        assert len(list(generate_frames(ds.PixelData, number_of_frames=12))) == 12
    asked: list[list[int]] = []
    pixels = mri_alm.imaging.volume._pixels

    def counted(file: Path, wanted: list[int], name: str) -> Any:
        asked.append(wanted)
        return pixels(file, wanted, name)

    monkeypatch.setattr(mri_alm.imaging.volume, "_pixels", counted)
    found = read_series(path.parent)
    for b, scan in ((50.0, low), (800.0, high)):
        np.testing.assert_array_equal(sitk.GetArrayFromImage(found[b]), scan.pixels)
    assert sorted(n for wanted in asked for n in wanted) == list(range(12))
    assert [len(wanted) for wanted in asked] == [6, 6]


def test_an_enhanced_file_with_fewer_images_than_its_header_says(tmp_path: Path) -> None:
    path = write_enhanced(tmp_path / "in" / "x.dcm", scans(0)[0])
    ds = pydicom.dcmread(path)
    ds.NumberOfFrames, ds.PixelData = 4, ds.PixelData[: 4 * 800]
    ds.save_as(path)
    with pytest.raises(StudyError, match="pixel data and header disagree on the number of images"):
        read_series(path.parent)


def claim(path: Path, *size: int) -> Path:
    """A NIfTI file of 8-bit zeros, whatever its size packed to kilobytes."""
    image = sitk.GetImageFromArray(np.zeros((2, 2, 2, 2)[: len(size)], np.uint8), isVector=False)
    sitk.WriteImage(image, str(path.with_suffix("")))
    head = bytearray(path.with_suffix("").read_bytes()[:352])
    head[40:56] = struct.pack("<8h", len(size), *size, *[1] * (7 - len(size)))
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(head)
        for _ in range(-(-int(np.prod(size)) // (1 << 24))):
            stream.write(bytes(1 << 24))
    return path


def test_a_4d_file_is_held_to_the_same_bound(tmp_path: Path) -> None:
    path = claim(tmp_path / "dwi.nii.gz", 512, 512, 64, 5)
    assert path.stat().st_size < 1e6
    with pytest.raises(StudyError, match=r"Column dwi: .*claims 83,886,080 voxels"):
        image_header(path, "dwi")


def test_image_files_of_one_exam_are_bounded_together(tmp_path: Path) -> None:
    """Each is small enough, and nothing is unpacked to find that they are not together."""
    for name in ("t2", "adc", "hbv"):
        claim(tmp_path / f"{name}.nii.gz", 512, 512, 100)
    item = {name: tmp_path / f"{name}.nii.gz" for name in ("t2", "adc", "hbv")}
    assert 512 * 512 * 100 < MAX_VOXELS < 3 * 512 * 512 * 100
    with pytest.raises(
        StudyError, match=r"claim 78,643,200 voxels \(t2 512 x 512 x 100, adc 512 x 512 x 100,"
    ) as error:
        load_images(item)
    assert error.value.code == "too_large"


def test_scaled_voxels_are_those_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    image = sitk.GetImageFromArray(rng.integers(-900, 900, (5, 7, 9)).astype(np.int16))
    sitk.WriteImage(image, str(tmp_path / "x.nii"))
    content = bytearray((tmp_path / "x.nii").read_bytes())
    content[112:120] = struct.pack("<2f", 0.1, 3.7)
    (tmp_path / "x.nii").write_bytes(content)
    monkeypatch.setattr("mri_alm.imaging.image_file.SCALED_AT_ONCE", 8)
    slope, shift = (float(np.float32(number)) for number in (0.1, 3.7))
    expected = (sitk.GetArrayFromImage(image) * slope + shift).astype(np.float32)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(image_header(tmp_path / "x.nii", "t2").read()), expected)


# --- Weights --------------------------------------------------------------------------------------------------------


def repacked(path: Path, **how: Any) -> Path:
    """A checkpoint of zeros whose archive is written anew."""
    torch.save({"model": {"weight": torch.zeros(2_000_000)}}, path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def test_a_deflated_tensor_is_not_inflated(tmp_path: Path) -> None:
    path = repacked(tmp_path / "x.pt", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    assert torch.load(path, weights_only=True)["model"]["weight"].shape == (2_000_000,)  # PyTorch would
    with pytest.raises(DamagedFileError, match=r"x\.pt is no checkpoint of this project: its archive holds compressed"):
        load_tensors(path)
    with pytest.raises(InputError, match="its archive holds compressed entries"):
        load_member(torch.nn.Linear(1, 1), path)


def test_an_archive_that_stores_its_entries_is_read(tmp_path: Path) -> None:
    assert load_tensors(repacked(tmp_path / "x.pt"))["model"]["weight"].shape == (2_000_000,)


class Asks:
    """Unpickling this makes as many bytes as it says, which ``weights_only`` allows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (3_000_000_000,)


def test_a_file_that_asks_for_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    torch.save({"model": Asks()}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 2000
    with pytest.raises(DamagedFileError, match=r"names __builtin__\.bytearray, which could fill the memory"):
        load_tensors(tmp_path / "x.pt")


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """The central directory of a zip archive may name one tensor's bytes a thousand times."""
    path = tmp_path / "x.pt"
    torch.save({"model": {"a": torch.zeros(999), "b": torch.ones(999)}}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        first, second = (next(e for e in archive.infolist() if e.filename.endswith(f"data/{n}")) for n in (0, 1))
    place = content.index(second.orig_filename.encode(), archive.start_dir)
    content[place - 4 : place] = struct.pack("<L", first.header_offset)
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="its archive holds entries that overlap"):
        load_tensors(path)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = repacked(tmp_path / "x.pt")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"other")
    with pytest.raises(DamagedFileError, match="its archive holds two entries of one name"):
        load_tensors(path)


def test_what_our_own_writer_wrote_passes(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "epoch": 3, "text": "ü"}
    save_tensors(tmp_path / "x.pt", state)
    found = load_tensors(tmp_path / "x.pt")
    assert torch.equal(found.pop("model")["weight"], state["model"]["weight"])  # type: ignore[index]
    assert found == {"epoch": 3, "text": "ü"}


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.replace(b"[0,24]", b"[0,99]"),
        lambda head: head.replace(b"[2,3]", b"[9,9]"),
        lambda head: head.replace(b"[24,48]", b"[ 0,24]"),
    ],
    ids=["past the end", "another shape", "two tensors on one place"],
)
def test_safetensors_itself_refuses_headers_that_lie(tmp_path: Path, change: Any) -> None:
    content = save({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)})
    (length,) = struct.unpack("<Q", content[:8])
    lie = content[:8] + change(content[8 : 8 + length]) + content[8 + length :]
    assert lie != content
    with pytest.raises(SafetensorError):
        load(lie)
    (tmp_path / "x.safetensors").write_bytes(lie)
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read as safetensors"):
        load_member(torch.nn.Linear(3, 2), tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [1 << 62, 200_000_000, 7])
def test_safetensors_itself_refuses_a_header_of_another_length(length: int) -> None:
    with pytest.raises(SafetensorError):
        load(struct.pack("<Q", length) + save({"a": torch.zeros(1)})[8:])


# --- CIFAR's pickles ------------------------------------------------------------------------------------------------


def test_an_array_larger_than_its_pickle_is_refused(tmp_path: Path) -> None:
    """NumPy makes an array of any shape from 80 bytes; what reads it all would take the memory."""

    class Claim:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.ndarray, ((1000, 3072), np.dtype("u1"))

    buffer = io.BytesIO()
    pickle.dump({"data": Claim(), "labels": [0] * 1000}, buffer, protocol=2)
    (tmp_path / "test_batch").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="test_batch claims an array larger than the file"):
        load_arrays(tmp_path / "test_batch")
