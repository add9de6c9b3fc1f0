"""Pictures by which a person judges an exam: T2, ADC, high b, and ADC's colours over T2."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import SimpleITK as sitk  # noqa: N813
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mri_alm.imaging.registration import Images

Array = NDArray[np.float32]

BOX_MM = 112.0  # the crop that configs/prostate_alm.json trains on
ADC_TOP = 2500.0  # 1e-6 mm2/s, shown white
T2_TOP, HIGH_B_TOP = 97.0, 99.5  # percentiles shown white: bladder and fat outshine a gland on T2, not at high b
STRIP_PIXELS = 256  # of a panel, as many as a prepared image has
STRIP_HEIGHTS = (0.35, 0.5, 0.65)  # of the slices, feet to head
PICTURE_HEIGHTS = (0.3, 0.5, 0.7)  # apex, middle and base of a gland in the middle
SHEET_BYTES = 700_000  # of all slices of an exam; below 1 MB as text in a page
SHEET_SLICES, SHEET_PIXELS = 32, 384  # the most of them, and of rows and columns of one
_QUALITIES = (80, 65, 50)  # of JPEG, the best that fits is taken


@dataclass(frozen=True)
class SliceSheet:
    """All slices of one exam as one picture, to be shown one at a time.

    Attributes:
        picture: JPEG in grey: a column per slice, from the feet; rows T2, ADC (0 to 2500e-6 mm2/s) and, where there is
            one, high b. The patient's right is left, the front on top.
        thumbnail: JPEG of the middle slice: T2, ADC, high b where there is one, and ADC's colours over T2.
        slices: Numbers of the columns among T2's slices in view, from 1 at the feet.
        depth: T2's slices in view; all are there unless they are more than 32 or too many bytes.
        rows: 3, or 2 without high b.
        ratio: Width of a slice over its height, in mm.
    """

    picture: bytes
    thumbnail: bytes
    slices: tuple[int, ...]
    depth: int
    rows: int
    ratio: float


def slice_sheet(images: Images) -> SliceSheet:
    """The slices of a registered exam, at most 700 kB.

    Args:
        images: ``t2``, ``adc`` (1e-6 mm2/s), ``valid`` and perhaps ``hbv``, on one grid.
    """
    names = [name for name in ("t2", "adc", "hbv", "valid") if name in images]
    oriented = {name: sitk.DICOMOrient(images[name], "LPS") for name in names}
    arrays: dict[str, Array] = {name: sitk.GetArrayFromImage(image) for name, image in oriented.items()}
    depth, rows, columns = arrays["t2"].shape
    spacing = oriented["t2"].GetSpacing()
    ratio = columns * spacing[0] / (rows * spacing[1])
    shown = _shown(arrays)
    volumes = [(255 * shown[name]).astype(np.uint8) for name in names if name != "valid"]
    count = min(depth, SHEET_SLICES)
    while True:
        chosen = np.unique(np.linspace(0, depth - 1, count).round().astype(int))
        picture = _small_enough(volumes, chosen)
        if len(picture) <= SHEET_BYTES or count == 1:
            break
        count = (count + 1) // 2
    thumbnail = _jpeg(_page(arrays, (0.5,), (112, max(1, round(112 / ratio)))))
    return SliceSheet(picture, thumbnail, tuple((chosen + 1).tolist()), depth, len(volumes), ratio)


def _small_enough(volumes: Sequence[NDArray[np.uint8]], chosen: NDArray[np.int_]) -> bytes:
    """JPEG of the chosen slices, a row per volume, of the best quality that fits, or of the least."""
    sheet = Image.fromarray(np.concatenate([np.concatenate(volume[chosen], axis=1) for volume in volumes]))
    _, rows, columns = volumes[0].shape
    scale = min(1.0, SHEET_PIXELS / max(rows, columns))
    size = (max(1, round(scale * columns)) * len(chosen), max(1, round(scale * rows)) * len(volumes))
    sheet = sheet.resize(size, Image.Resampling.BILINEAR) if scale < 1 else sheet
    for quality in _QUALITIES:
        picture = _jpeg(sheet, quality)
        if len(picture) <= SHEET_BYTES:
            break
    return picture


def study_strip(arrays: Mapping[str, Array], spacing: Sequence[float]) -> bytes:
    """JPEG of a prepared study: a row per height, four panels each; the box is the training crop.

    Args:
        arrays: ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and ``valid``, each (slices, rows, columns).
        spacing: Millimetres along columns, rows and slices.
    """
    _, rows, columns = arrays["t2"].shape
    field = (columns * spacing[0], rows * spacing[1])
    width, height = size = (STRIP_PIXELS, round(STRIP_PIXELS * field[1] / field[0]))
    page = _page(arrays, STRIP_HEIGHTS, size)
    reach = [0.5 * pixels * min(1.0, BOX_MM / mm) for pixels, mm in zip(size, field, strict=True)]
    for row in range(len(STRIP_HEIGHTS)):
        x, y = width / 2, (row + 0.5) * height
        corners = [x - reach[0], y - reach[1], x + reach[0] - 1, y + reach[1] - 1]
        ImageDraw.Draw(page).rectangle(corners, outline=(80, 200, 120), width=2)
    return _jpeg(page)


def reduced(picture: bytes, width: int) -> bytes:
    """A JPEG made as narrow as this, in pixels; one that is narrower or damaged stays as it is."""
    try:
        with Image.open(io.BytesIO(picture), formats=("JPEG",)) as page:
            if page.width <= width:
                return picture
            small = page.resize((width, round(width * page.height / page.width)), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return picture
    return _jpeg(small)


def study_picture(image: Array, spacing: Sequence[float], title: str) -> bytes:
    """PNG of one prepared exam: T2, registered ADC, and ADC's colours over T2, at three heights.

    Args:
        image: ``(3, X, Y, Z)``, as the network sees it: ADC in [0, 1] (3000e-6 mm2/s), high b-value, T2 (z-scores).
        spacing: Millimetres along X, Y and Z.
        title: One line above; must not identify the patient.
    """
    figure = Figure(figsize=(9, 9.4), facecolor="black", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color="white", fontsize=12)
    axes = figure.subplots(len(PICTURE_HEIGHTS), 3)
    for row, (level, panels) in zip(axes, _panels(_arrays(image), PICTURE_HEIGHTS), strict=True):
        for axis, name, panel in zip(row, ("T2", "ADC, registered", "ADC over T2"), panels, strict=True):
            axis.imshow(panel, aspect=spacing[1] / spacing[0], interpolation="bilinear")
            axis.set_title(f"{name}, slice {level + 1}", color="white", fontsize=9)
            axis.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80, metadata={"Software": None})
    return buffer.getvalue()


def study_thumbnail(image: Array) -> bytes:
    """JPEG of one prepared exam at half height: T2, registered ADC, and ADC's colours over T2, side by side.

    Args:
        image: As for :func:`study_picture`; in-plane spacing is taken as equal.
    """
    _, columns, rows, depth = image.shape
    middle = image[..., depth // 2, None]  # alone: the brightness is its own
    return _jpeg(_page(_arrays(middle), (0.0,), (180, round(180 * rows / columns))))


def _arrays(image: Array) -> dict[str, Array]:
    """T2 and ADC of an exam as the network sees it, as images are stored: (slices, rows, columns)."""
    adc, _, t2 = image.transpose(0, 3, 2, 1)
    return {"t2": t2, "adc": 3000 * adc}


def _panels(arrays: Mapping[str, Array], heights: Sequence[float]) -> Iterator[tuple[int, list[NDArray[np.float64]]]]:
    """Per height the slice's number and its panels: T2, ADC, high b where there is one, ADC's colours over T2.

    Args:
        arrays: ``t2``, ``adc`` (1e-6 mm2/s), and perhaps ``hbv`` and ``valid``, where the colours are.
        heights: Shares of the slices, from the feet.

    Yields:
        Panels (rows, columns, 3) in 0 to 1.
    """
    shown = _shown(arrays)
    depth = len(shown["t2"])
    for height in heights:
        level = min(int(height * depth), depth - 1)
        gray = {name: np.repeat(volume[level][..., None], 3, axis=2) for name, volume in shown.items()}
        mixed = 0.55 * gray["t2"] + 0.45 * colormaps["inferno"](shown["adc"][level])[..., :3]
        if "valid" in arrays:
            mixed = np.where(arrays["valid"][level][..., None] > 0, mixed, gray["t2"])
        yield level, [*(gray[name] for name in ("t2", "adc", "hbv") if name in gray), mixed]


def _shown(arrays: Mapping[str, Array]) -> dict[str, NDArray[np.float64]]:
    """The images as brightness from 0 to 1."""
    shown = {name: _window(arrays[name], top) for name, top in (("t2", T2_TOP), ("hbv", HIGH_B_TOP)) if name in arrays}
    return shown | {"adc": np.clip(arrays["adc"] / ADC_TOP, 0, 1)}


def _window(array: Array, top: float) -> NDArray[np.float64]:
    """Values between two percentiles of the middle of the volume, as 0 to 1: its rim glows beside the coils."""
    middle = array[tuple(slice(size // 4, size - size // 4) for size in array.shape)]
    inside = middle[middle != 0]
    low, high = np.percentile(inside, (1, top)) if inside.size else (0.0, 1.0)
    return np.clip((array - low) / max(high - low, 1e-9), 0, 1).astype(np.float64)


def _page(arrays: Mapping[str, Array], heights: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """The panels, a row per height, each of a size in pixels."""
    rows = [panels for _, panels in _panels(arrays, heights)]
    page = Image.new("RGB", (len(rows[0]) * size[0], len(rows) * size[1]))
    for y, panels in enumerate(rows):
        for x, panel in enumerate(panels):
            picture = Image.fromarray((255 * panel).astype(np.uint8))
            page.paste(picture.resize(size, Image.Resampling.BILINEAR), (x * size[0], y * size[1]))
    return page


def _jpeg(page: Image.Image, quality: int = 75) -> bytes:
    buffer = io.BytesIO()
    page.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
