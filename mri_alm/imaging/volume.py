"""Frames of one series, echo and b-value -> one SimpleITK volume, or a typed refusal.

No folder reader does this safely on diffusion (b-values are stacked, missing slices closed up), so the volume is
built from the headers: sorted by position along the slice normal, spacing from the positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.encaps import generate_frames
from pydicom.pixels import get_decoder
from pydicom.uid import RLELossless
from scipy.ndimage import uniform_filter

from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import DAMAGED, read_dicom
from mri_alm.imaging.diffusion import MIN_TISSUE, TISSUE, central_field, rank_correlation
from mri_alm.imaging.series import SAME_VOXEL, Frame, Series

GAP_TOLERANCE = 0.05  # of the median distance between slices
COSINE_TOLERANCE = 1e-4
SAME_PLACE_MM = 0.01
SCALE_JUMP = 1.7  # of a slice's median over its neighbours'; 1.15 at most on the exams
# Repeats and directions of one b: diffusivities 0.3e-3 mm2/s apart differ by 1.6 at b = 1,500.
REPEATS_RATIO = 2.0
# Rank correlation of tissue. On the real exams: repeats as noisy as one of 20 averages have 0.78 or more, a mirrored
# image 0.23 to 0.73, another patient's 0.45 at most (docs/ingest.md).
REPEATS_LIKE = 0.5  # refused below
REPEATS_SURE = 0.75  # said below
SPACING_MM = 0.01, 100.0  # anything else is no MR image
# Of all images that are read for one exam: 256 MiB as float32, nine times the largest prostate exam at hand. A header
# may claim anything, and compressed images of one value take next to no room in a file.
MAX_VOXELS = 2**26
MAX_PIXELS = 2**22  # of one slice, 2,048 x 2,048: the largest at hand has 640 x 640
RLE_GROWTH = 1.1  # run lengths of pure noise take 129/128 of it


def check_size(series: Sequence[Series]) -> None:
    """Refuse series that are more than any exam, by their headers, before a pixel is decoded.

    Args:
        series: All that are to be in memory at once.

    Raises:
        StudyError: ``too_large``.
    """
    sizes = {id(one): sum(frame.shape[0] * frame.shape[1] for frame in one.frames) for one in series}
    if (total := sum(sizes.values())) <= MAX_VOXELS:
        return
    largest = max(series, key=lambda one: sizes[id(one)])
    rows, columns = largest.frames[0].shape
    raise StudyError(
        "too_large",
        f"The headers of {len(sizes)} series claim {total:,} voxels, and an exam has {MAX_VOXELS:,} at most. The "
        f"largest is series {largest.number}: {len(largest.frames)} images of {rows} x {columns} pixels. Leave it out "
        "of the export, export it with fewer or smaller images, or name the right series for this study in the "
        "rules file.",
    )


def build_volume(frames: list[Frame], name: str, *, blanked: bool = False) -> sitk.Image:
    """One float32 volume in LPS millimetres from frames in any order, rescaled per frame.

    Args:
        frames: All frames of one volume.
        name: What the error messages call it, such as ``"series 6 at b = 800"``.
        blanked: Slices of one value are part of it, as of calculated images that are blanked where they show noise;
            otherwise they are left out at the ends, and refused in between.

    Raises:
        StudyError: ``geometry``, ``duplicate_slices``, ``slice_gap``, ``too_few_slices``, ``no_decoder``,
            ``damaged_file`` or ``empty_volume``.
    """
    if len(frames) < 2:
        raise StudyError("too_few_slices", f"{name} has {len(frames)} slices; a volume needs two.")
    direction = _direction(frames, name)
    positions = np.array([frame.position for frame in frames])
    order = np.argsort(positions @ direction[2], kind="stable")
    frames, positions = [frames[i] for i in order], positions[order]
    gap = _gap(positions, direction[2], name)
    _check_locations(frames, name)
    stack, first = _stack(frames, name), 0
    if not blanked:
        stack, first = _without_empty(stack, name)
    _check_scales(stack, frames[first : first + len(stack)], name)
    image = sitk.GetImageFromArray(stack)
    image.SetSpacing((frames[0].spacing[1], frames[0].spacing[0], gap))
    image.SetOrigin(positions[first].tolist())
    image.SetDirection(direction.T.ravel().tolist())
    return image


def build_mean(frames: list[Frame], name: str, warnings: list[str]) -> sitk.Image:
    """One volume of one b-value, repeats and directions averaged: the trace-weighted image scanners compute themselves.

    Repeats are averaged within their direction first, so that each direction counts alike. Where the series holds a
    trace beside its directions, the trace alone is used.

    Args:
        frames: All frames of one b-value, in any order.
        name: As for :func:`build_volume`.
        warnings: Gets a sentence where repeats or directions resemble one another little.

    Raises:
        StudyError: As :func:`build_volume`; ``duplicate_slices`` where some positions have more images than others, or
            images of another type.
    """
    directions: dict[tuple[float, ...] | None, list[Frame]] = {}
    for frame in frames:
        directions.setdefault(frame.direction, []).append(frame)
    if None in directions or len(directions) == 1:
        return _mean_of_repeats(directions.get(None, frames), name, warnings)
    each = enumerate(directions.values(), 1)
    means = [_mean_of_repeats(same, f"{name}, direction {number}", warnings) for number, same in each]
    return geometric_mean(means, name, warnings)


def geometric_mean(volumes: Sequence[sitk.Image], name: str, warnings: list[str]) -> sitk.Image:
    """Mean of several volumes of one b-value, float32.

    A monoexponential decay along each direction stays one, with the mean diffusivity as its ADC; an arithmetic mean is
    always larger, the more so the higher b is, and lowers the ADC of anisotropic tissue.

    Args:
        volumes: Directions or repeats; a single one is returned as it is.
        name: As for :func:`build_volume`.
        warnings: As for :func:`build_mean`.

    Raises:
        StudyError: ``geometry`` when they do not lie on one grid; ``volumes_differ`` as of
            :func:`mri_alm.imaging.volume.check_repeats`.
    """
    first = volumes[0]
    if len(volumes) == 1:
        return first
    if any(one.GetSize() != first.GetSize() or not np.allclose(one.GetOrigin(), first.GetOrigin()) for one in volumes):
        raise StudyError("geometry", f"{name}: its {len(volumes)} directions or repeats do not cover the same slices.")
    check_repeats(volumes, name, warnings)
    logs = [np.log(np.maximum(sitk.GetArrayViewFromImage(one), 1e-6)) for one in volumes]
    mean = sitk.GetImageFromArray(np.exp(np.mean(logs, axis=0)))
    mean.CopyInformation(first)
    return mean


def check_repeats(volumes: Sequence[sitk.Image], name: str, warnings: list[str]) -> None:
    """Refuse volumes that are to be averaged as one b-value and differ as no repeats or directions of tissue do.

    Args:
        volumes: Two or more on one grid.
        name: What the message calls them.
        warnings: Gets a sentence where they differ more than repeats of the exams at hand, and less than what is
            refused.

    Raises:
        StudyError: ``volumes_differ``.
    """
    compared = likeness(volumes)
    for number, (ratio, alike) in enumerate(compared, 1):
        if not 1 / REPEATS_RATIO < ratio < REPEATS_RATIO or not alike > REPEATS_LIKE:
            raise StudyError(
                "volumes_differ",
                f"{name}: volume {number} of {len(volumes)} is no repeat or direction of the others (median "
                f"{ratio:.2g} times theirs, rank correlation {alike:.2f}). One of them is another kind of image, such "
                "as an ADC map, or has a wrong b-value. Export them apart, or name the right series in the rules.",
            )
    if (least := min((alike for _, alike in compared), default=1.0)) < REPEATS_SURE:
        warnings.append(
            f"{name}: its {len(volumes)} repeats or directions resemble one another little (rank correlation "
            f"{least:.2f}; {REPEATS_SURE:g} or more is usual). Look whether all show the same patient, upright."
        )


def likeness(volumes: Sequence[sitk.Image]) -> list[tuple[float, float]]:
    """How each of two or more volumes on one grid compares with the others' median, smoothed, where there is tissue.

    Returns:
        For each volume the ratio of the medians and the rank correlation; nothing where too little is tissue.
    """
    fields = np.stack([uniform_filter(central_field(one), (1, 3, 3)) for one in volumes])  # noise is not compared
    middle = np.median(fields, axis=0)
    tissue = middle > TISSUE * np.percentile(middle, 99)
    if tissue.sum() < MIN_TISSUE:
        return []
    rest = [np.median(np.delete(fields, number, axis=0), axis=0)[tissue] for number in range(len(fields))]
    pairs = [(field[tissue], others) for field, others in zip(fields, rest, strict=True)]
    return [
        (float((np.median(own) + 1e-6) / (np.median(others) + 1e-6)), rank_correlation(own, others))
        for own, others in pairs
    ]


def common_slices(images: Mapping[str, sitk.Image]) -> tuple[dict[str, sitk.Image], str]:
    """Images of one grid cut to the slices that all of them have: numbers of slices mean nothing, positions do.

    Args:
        images: What a message calls it -> image.

    Returns:
        The images in the same order, and what was cut in words; empty where nothing was.

    Raises:
        StudyError: ``geometry`` when they lie on several grids; ``slices_differ`` when they share less than half.
    """
    first = next(iter(images.values()))
    normal, step = np.array(first.GetDirection()).reshape(3, 3)[:, 2], first.GetSpacing()[2]
    start = {name: (np.array(one.GetOrigin()) - first.GetOrigin()) @ normal / step for name, one in images.items()}
    for name, one in images.items():
        aside = np.array(one.GetOrigin()) - first.GetOrigin() - round(start[name]) * step * normal
        if (
            one.GetSize()[:2] != first.GetSize()[:2]
            or not np.allclose(one.GetSpacing(), first.GetSpacing(), rtol=1e-3)
            or not np.allclose(one.GetDirection(), first.GetDirection(), atol=1e-3)
            or np.abs(aside).max() > SAME_VOXEL * min(first.GetSpacing())
        ):
            raise StudyError("geometry", f"{name} and {next(iter(images))} lie on different grids.")
    begin = max(map(round, start.values()))
    end = min(round(start[name]) + one.GetSize()[2] for name, one in images.items())
    most = max(one.GetSize()[2] for one in images.values())
    if 2 * (end - begin) <= most:
        raise StudyError("slices_differ", f"{' and '.join(images)} share {max(end - begin, 0)} of {most} slices.")
    if all(one.GetSize()[2] == end - begin for one in images.values()):
        return dict(images), ""
    counts = ", ".join(f"{name} has {one.GetSize()[2]}" for name, one in images.items())
    cut = {name: one[:, :, begin - round(start[name]) : end - round(start[name])] for name, one in images.items()}
    return cut, f"Slices differ ({counts}): only the {end - begin} that all have are used."


def _mean_of_repeats(frames: list[Frame], name: str, warnings: list[str]) -> sitk.Image:
    return geometric_mean([build_volume(repeat, name) for repeat in _repeats(frames)], name, warnings)


def _repeats(frames: list[Frame]) -> list[list[Frame]]:
    """The complete repeats that frames consist of; all in one list where positions or image types do not allow that."""
    along = np.array([frame.position @ frames[0].normal for frame in frames])
    order = np.argsort(along, kind="stable")
    along = along[order]
    starts = np.flatnonzero(np.diff(along, prepend=-np.inf) > SAME_PLACE_MM)
    counts = np.diff(starts, append=len(frames))
    if len({frame.image_type for frame in frames}) > 1 or len(set(counts.tolist())) != 1:
        return [frames]
    return [[frames[index] for index in order[start :: counts[0]]] for start in range(counts[0])]


def _direction(frames: list[Frame], name: str) -> NDArray[np.float64]:
    """Unit vectors along a row, along a column and across the slices, as rows (3, 3)."""
    first = frames[0]
    cosines = np.array([frame.orientation for frame in frames])
    if not np.all(np.abs(cosines - cosines[0]) <= COSINE_TOLERANCE):
        apart = np.max(np.abs(cosines - cosines[0]))
        raise StudyError("geometry", f"{name}: direction cosines differ between slices by {apart:.2g} (1e-4 allowed).")
    row, column = cosines[0, :3], cosines[0, 3:]
    if not np.allclose([row @ row, column @ column, row @ column], [1, 1, 0], atol=1e-3):
        raise StudyError("geometry", f"{name}: row and column directions are not perpendicular unit vectors.")
    if absent := sum(not np.isfinite(frame.spacing).all() for frame in frames):
        raise StudyError(
            "geometry", f"{name}: {absent} of {len(frames)} images have no pixel spacing. Export the series again."
        )
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1 or not all(np.allclose(frame.spacing, first.spacing, rtol=1e-3) for frame in frames):
        raise StudyError("geometry", f"{name}: slices differ in size or pixel spacing ({sorted(shapes)}).")
    if not all(SPACING_MM[0] <= spacing <= SPACING_MM[1] for spacing in first.spacing):
        raise StudyError("geometry", f"{name}: pixel spacing is {first.spacing}; it must be 0.01 to 100 mm.")
    row = row / np.linalg.norm(row)
    column = column - (column @ row) * row
    column = column / np.linalg.norm(column)
    return np.stack([row, column, np.cross(row, column)])


def _gap(positions: NDArray[np.float64], normal: NDArray[np.float64], name: str) -> float:
    """Slice distance of positions (N, 3) sorted along the normal, in mm; refuses anything but a regular stack."""
    along = positions @ normal
    gaps = np.diff(along)
    if (shared := gaps < SAME_PLACE_MM).any():
        at = along[:-1][shared][0]
        raise StudyError(
            "duplicate_slices",
            f"{name}: {int(shared.sum())} slices share a position, the first at {at:.2f} mm along the normal. "
            "The series mixes several volumes (incomplete repeats, phases); export them as series of their own.",
        )
    median = float(np.median(gaps))
    if (np.abs(gaps - median) > GAP_TOLERANCE * median).any():
        worst = int(np.argmax(np.abs(gaps - median)))
        raise StudyError(
            "slice_gap",
            f"{name}: slices {worst + 1} and {worst + 2} of {len(positions)} are {gaps[worst]:.2f} mm apart, the "
            f"others {median:.2f} mm. A slice is missing; export the series again.",
        )
    drift = positions - positions[0] - np.outer(along - along[0], normal)
    if np.abs(drift).max() > GAP_TOLERANCE * median:
        raise StudyError("geometry", f"{name}: slices are shifted sideways by up to {np.abs(drift).max():.2f} mm.")
    return float(along[-1] - along[0]) / (len(along) - 1)


def _stack(frames: list[Frame], name: str) -> NDArray[np.float32]:
    """Physical values (slices, rows, columns) of frames already in order; one file at a time is decoded."""
    shape = frames[0].shape
    if len(frames) * shape[0] * shape[1] > MAX_VOXELS or shape[0] * shape[1] > MAX_PIXELS:
        raise StudyError("too_large", f"{name}: {len(frames)} slices of {shape} pixels are no MR volume.")
    places: dict[Path, list[int]] = {}
    for place, frame in enumerate(frames):
        places.setdefault(frame.file, []).append(place)
    stack = np.empty((len(frames), *shape), np.float32)
    for file, own in places.items():
        own.sort(key=lambda place: frames[place].index)
        stored = _pixels(file, [frames[place].index for place in own], name)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged slope; refused below as not finite
            for place, pixels in zip(own, stored, strict=True):
                stack[place] = _physical(pixels, frames[place])
    if not np.isfinite(stack).all() or stack.min() == stack.max():
        raise StudyError(
            "empty_volume", f"{name}: every voxel has the value {stack.flat[0]:g}, or some are not finite."
        )
    return stack


def _check_locations(frames: list[Frame], name: str) -> None:
    """Refuse frames, in order of their positions, whose SliceLocation says another order."""
    places = [frame.location for frame in frames if frame.location is not None]
    steps = np.diff(places)
    if len(places) == len(frames) and (steps > 0).any() and (steps < 0).any():
        raise StudyError(
            "geometry", f"{name}: positions and slice locations give its slices different orders. Export it again."
        )


def _without_empty(stack: NDArray[np.float32], name: str) -> tuple[NDArray[np.float32], int]:
    """Slices (N, rows, columns) without those of one value at either end, and the number of the first kept."""
    filled = np.flatnonzero(np.ptp(stack, axis=(1, 2)) > 0)
    first, end = int(filled[0]), int(filled[-1]) + 1
    if len(filled) != end - first:
        missing = next(n for n in range(first, end) if n not in filled)
        raise StudyError(
            "empty_slice", f"{name}: slice {missing + 1} of {len(stack)} has one value everywhere. Export it again."
        )
    if len(filled) < 2 or 2 * len(filled) <= len(stack):
        raise StudyError("empty_volume", f"{name}: only {len(filled)} of {len(stack)} slices show anything.")
    return stack[first:end], first


def _check_scales(stack: NDArray[np.float32], frames: list[Frame], name: str) -> None:
    """Refuse slices whose scale differs from their neighbours' and whose values jump with it."""
    slopes = np.array([frame.slope for frame in frames])
    if np.ptp(slopes) == 0:
        return
    levels = np.array([np.median(one[one > 0]) if (one > 0).any() else np.nan for one in stack])
    for n in np.flatnonzero(slopes != np.median(slopes)):
        beside = np.nanmean(levels[[k for k in (n - 1, n + 1) if 0 <= k < len(levels)]])
        if not 1 / SCALE_JUMP < levels[n] / beside < SCALE_JUMP:
            raise StudyError(
                "scale_jump",
                f"{name}: slice {n + 1} of {len(frames)} has a rescale slope of {slopes[n]:g} and values "
                f"{levels[n] / beside:.2f} times its neighbours'. Its scale is wrong; export the series again.",
            )


def _physical(stored: NDArray[np.generic], frame: Frame) -> NDArray[np.float32]:
    return (stored.astype(np.float64) * frame.slope + frame.intercept).astype(np.float32)


def _pixels(file: Path, wanted: list[int], name: str) -> Iterator[NDArray[np.generic]]:
    """Stored values (rows, columns) of some frames of a file, given in ascending order; the others stay undecoded."""
    try:
        ds = read_dicom(file)
        syntax, count = ds.file_meta.TransferSyntaxUID, int(ds.get("NumberOfFrames") or 1)
        if int(ds.Rows) * int(ds.Columns) * count > MAX_VOXELS:
            raise StudyError("too_large", f"{name}: the header of one file claims more pixels than any MR image.")
        if syntax.is_compressed:
            _check_decoder(ds, count, name)
        elif _uses_other_bits(ds, little=syntax.is_little_endian):
            raise StudyError(
                "bits_unfit",
                f"{name}: the header of one file says that a pixel has {ds.BitsStored} bits, and its pixels have more: "
                "which is right cannot be told. Export the series again.",
            )
        if count <= wanted[-1]:
            raise StudyError("damaged_file", f"{name}: pixel data and header disagree on the number of images.")
        if count == 1:
            yield from [ds.pixel_array] * len(wanted)
            return
        every = wanted == list(range(count))  # then the frames are found once, not once each
        for pixels, _ in get_decoder(syntax).iter_array(ds, indices=None if every else wanted):
            yield pixels
    except StudyError:
        raise
    except (*DAMAGED, RuntimeError) as error:
        raise StudyError(
            "damaged_file", f"{name}: the pixels of one file cannot be read ({type(error).__name__})."
        ) from error


def _uses_other_bits(ds: Dataset, *, little: bool) -> bool:
    """Whether uncompressed pixels have values in bits that the header calls unused; readers cut these off in silence.

    An overlay may lie there, as old files keep it, and the sign of a negative value may be repeated in them.
    """
    overlays = any(ds.get((group, 0x0102)) and ds[group, 0x0102].value for group in range(0x6000, 0x6020, 2))
    unused = int(ds.BitsAllocated) - int(ds.BitsStored)
    if ds.BitsAllocated != 16 or unused < 1 or overlays:
        return False
    words = np.frombuffer(ds.PixelData[: len(ds.PixelData) // 2 * 2], "<u2" if little else ">u2")
    beyond = words >> np.uint16(ds.BitsStored)
    every = (1 << unused) - 1
    return bool((beyond % every if ds.PixelRepresentation else beyond).any())


def _check_decoder(ds: Dataset, count: int, name: str) -> None:
    """Refuse compressed pixels that nothing installed decodes, and run lengths that give more than the header says."""
    syntax = ds.file_meta.TransferSyntaxUID
    if not (decoder := get_decoder(syntax)).is_available:
        known = any("gdcm" in needed for needed in decoder.missing_dependencies)
        way = "install one: pip install -e '.[dicom-compressed]'" if known else "none is known here: export it"
        way += "" if known else " uncompressed, or as JPEG 2000"
        raise StudyError("no_decoder", f"{name} is compressed ({syntax.name}) and no decoder is installed; {way}.")
    if syntax == RLELossless:
        most = RLE_GROWTH * int(ds.Rows) * int(ds.Columns) * int(ds.BitsAllocated) // 8 + 1024
        if any(len(frame) > most for frame in generate_frames(ds.PixelData, number_of_frames=count)):
            raise StudyError(
                "damaged_file", f"{name}: one file holds more run lengths than its image can need. Export it again."
            )
