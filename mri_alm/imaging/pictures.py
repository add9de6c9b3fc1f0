"""Pictures by which a person judges an exam: T2, ADC, high b, and ADC's colours over T2."""

import io
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Array = NDArray[np.float32]

BOX_MM = 112.0  # the crop that configs/prostate_alm.json trains on
ADC_TOP = 2500.0  # 1e-6 mm2/s, shown white
STRIP_HEIGHTS = (0.35, 0.5, 0.65)  # of the slices, feet to head
PICTURE_HEIGHTS = (0.3, 0.5, 0.7)  # apex, middle and base of a gland in the middle


def study_strip(arrays: Mapping[str, Array], spacing: Sequence[float]) -> bytes:
    """JPEG of a prepared study: a row per height, four panels each; the box is the training crop.

    Args:
        arrays: ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and ``valid``, each (slices, rows, columns).
        spacing: Millimetres along columns, rows and slices.
    """
    _, rows, columns = arrays["t2"].shape
    field = (columns * spacing[0], rows * spacing[1])
    width, height = size = (160, round(160 * field[1] / field[0]))
    page = _page(arrays, STRIP_HEIGHTS, size)
    reach = [0.5 * pixels * min(1.0, BOX_MM / mm) for pixels, mm in zip(size, field, strict=True)]
    for row in range(len(STRIP_HEIGHTS)):
        x, y = width / 2, (row + 0.5) * height
        corners = [x - reach[0], y - reach[1], x + reach[0] - 1, y + reach[1] - 1]
        ImageDraw.Draw(page).rectangle(corners, outline=(80, 200, 120))
    return _jpeg(page)


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
    shown = {name: _window(arrays[name]) for name in ("t2", "hbv") if name in arrays}
    shown["adc"] = np.clip(arrays["adc"] / ADC_TOP, 0, 1)
    depth = len(shown["t2"])
    for height in heights:
        level = min(int(height * depth), depth - 1)
        gray = {name: np.repeat(volume[level][..., None], 3, axis=2) for name, volume in shown.items()}
        mixed = 0.55 * gray["t2"] + 0.45 * colormaps["inferno"](shown["adc"][level])[..., :3]
        if "valid" in arrays:
            mixed = np.where(arrays["valid"][level][..., None] > 0, mixed, gray["t2"])
        yield level, [*(gray[name] for name in ("t2", "adc", "hbv") if name in gray), mixed]


def _window(array: Array) -> NDArray[np.float64]:
    """Values between the 1st and 99.5th percentile of the middle, as 0 to 1: the rim glows beside the coils."""
    _, height, width = array.shape
    middle = array[:, height // 4 : -(height // 4), width // 4 : -(width // 4)]
    inside = middle[middle != 0]
    low, high = np.percentile(inside, (1, 99.5)) if inside.size else (0.0, 1.0)
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


def _jpeg(page: Image.Image) -> bytes:
    buffer = io.BytesIO()
    page.save(buffer, "JPEG", quality=75)
    return buffer.getvalue()
