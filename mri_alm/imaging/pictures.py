"""Pictures by which a person judges an exam: T2, ADC, high b, and ADC's colours over T2."""

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw

BOX_MM = 112.0  # the crop that configs/prostate_alm.json trains on
_STRIP_HEIGHTS = (0.35, 0.5, 0.65)  # of the slices, feet to head
_PIXELS = 160  # of one panel
_ADC_TOP = 2500.0  # 1e-6 mm2/s


def study_strip(arrays: Mapping[str, NDArray[np.float32]], spacing: Sequence[float]) -> bytes:
    """JPEG of a prepared study: a row per height, four panels each; the box is the training crop.

    Args:
        arrays: ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and ``valid``, each (slices, rows, columns).
        spacing: Millimetres along columns, rows and slices.
    """
    depth, height, width = arrays["t2"].shape
    panel = (_PIXELS, round(_PIXELS * height * spacing[1] / (width * spacing[0])))
    page = Image.new("RGB", (4 * panel[0], len(_STRIP_HEIGHTS) * panel[1]))
    gray = {name: _window(arrays[name]) for name in ("t2", "hbv")}
    adc = np.clip(arrays["adc"] / _ADC_TOP, 0, 1)
    colours = mpl.colormaps["inferno"](adc)[..., :3]
    for row, part in enumerate(_STRIP_HEIGHTS):
        level = min(int(part * depth), depth - 1)
        t2 = np.repeat(gray["t2"][level][..., None], 3, axis=2)
        known = arrays["valid"][level][..., None] > 0
        over = np.where(known, 0.55 * t2 + 0.45 * colours[level], t2)
        for column, picture in enumerate((t2, adc[level], gray["hbv"][level], over)):
            page.paste(_panel(picture, panel), (column * panel[0], row * panel[1]))
        _box(page, row, panel, (width * spacing[0], height * spacing[1]))
    buffer = io.BytesIO()
    page.save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


def _window(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """Values between the 1st and 99.5th percentile of the middle, as 0 to 1: the rim glows beside the coils."""
    _, height, width = array.shape
    middle = array[:, height // 4 : -(height // 4), width // 4 : -(width // 4)]
    inside = middle[middle != 0]
    low, high = np.percentile(inside, (1, 99.5)) if inside.size else (0.0, 1.0)
    return np.clip((array - low) / max(high - low, 1e-9), 0, 1).astype(np.float64)


def _panel(picture: NDArray[np.float64], size: tuple[int, int]) -> Image.Image:
    return Image.fromarray((255 * picture).astype(np.uint8)).convert("RGB").resize(size, Image.Resampling.BILINEAR)


def _box(page: Image.Image, row: int, panel: tuple[int, int], field_mm: tuple[float, float]) -> None:
    """Outline of the training crop on the T2 panel."""
    half = [0.5 * size * min(1.0, BOX_MM / mm) for size, mm in zip(panel, field_mm, strict=True)]
    middle = (panel[0] / 2, (row + 0.5) * panel[1])
    corners = [middle[0] - half[0], middle[1] - half[1], middle[0] + half[0] - 1, middle[1] + half[1] - 1]
    ImageDraw.Draw(page).rectangle(corners, outline=(80, 200, 120))


_HEIGHTS = (0.3, 0.5, 0.7)  # of the grid, feet to head: apex, middle and base of a gland in the middle


def study_picture(image: NDArray[np.float32], spacing: Sequence[float], title: str) -> bytes:
    """PNG of one prepared exam: T2, registered ADC, and ADC's colours over T2, at three heights.

    Args:
        image: ``(3, X, Y, Z)``, as the network sees it: ADC in [0, 1] (3000e-6 mm2/s), high b-value, T2 (z-scores).
        spacing: Millimetres along X, Y and Z.
        title: One line above; must not identify the patient.
    """
    adc, _, t2 = image
    figure = Figure(figsize=(9, 9.4), facecolor="black", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color="white", fontsize=12)
    axes = figure.subplots(len(_HEIGHTS), 3)
    aspect = spacing[1] / spacing[0]
    low, high = np.percentile(t2, (1, 99))
    for row, height in zip(axes, _HEIGHTS, strict=True):
        level = int(height * t2.shape[2])
        anatomy, map_ = t2[:, :, level].T, adc[:, :, level].T
        gray = {"cmap": "gray", "aspect": aspect, "interpolation": "bilinear"}
        row[0].imshow(anatomy, vmin=low, vmax=high, **gray)
        row[1].imshow(map_, vmin=0, vmax=0.8, **gray)
        row[2].imshow(anatomy, vmin=low, vmax=high, **gray)
        row[2].imshow(map_, vmin=0, vmax=0.8, cmap="inferno", alpha=0.45, aspect=aspect)
        for axis, name in zip(row, ("T2", "ADC, registered", "ADC over T2"), strict=True):
            axis.set_title(f"{name}, slice {level + 1}", color="white", fontsize=9)
            axis.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80, metadata={"Software": None})
    return buffer.getvalue()


def study_thumbnail(image: NDArray[np.float32], width: int = 540) -> bytes:
    """JPEG of one prepared exam at half height: T2, registered ADC, and ADC's colours over T2, side by side.

    Args:
        image: As for :func:`study_picture`; in-plane spacing is taken as equal.
        width: Pixels of all three together.
    """
    level = image.shape[3] // 2
    adc, _, t2 = (channel[:, :, level].T for channel in image)
    low, high = np.percentile(t2, (1, 99))
    anatomy = colormaps["gray"](np.clip((t2 - low) / max(high - low, 1e-6), 0, 1))[..., :3]
    shown = np.clip(adc / 0.8, 0, 1)
    overlay = 0.55 * anatomy + 0.45 * colormaps["inferno"](shown)[..., :3]
    row = np.concatenate([anatomy, colormaps["gray"](shown)[..., :3], overlay], axis=1)
    picture = Image.fromarray((255 * row).round().astype(np.uint8))
    buffer = io.BytesIO()
    scale = width / picture.width
    picture.resize((width, round(scale * picture.height)), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
