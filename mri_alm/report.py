"""Pictures of a scored exam."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

_HEIGHTS = (0.3, 0.5, 0.7)  # of the grid, feet to head: apex, middle and base of a gland in the middle


def study_picture(image: Tensor, spacing: Sequence[float], title: str) -> bytes:
    """PNG of one prepared exam: T2, registered ADC, and ADC's colours over T2, at three heights.

    Args:
        image: ``(3, X, Y, Z)``, as the network sees it: ADC in [0, 1] (3000e-6 mm2/s), high b-value, T2 (z-scores).
        spacing: Millimetres along X, Y and Z.
        title: One line above; must not identify the patient.
    """
    adc, _, t2 = (channel.numpy() for channel in image)
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


def study_thumbnail(image: Tensor, width: int = 540) -> bytes:
    """JPEG of one prepared exam at half height: T2, registered ADC, and ADC's colours over T2, side by side.

    Args:
        image: As for :func:`study_picture`; in-plane spacing is taken as equal.
        width: Pixels of all three together.
    """
    level = image.shape[3] // 2
    adc, _, t2 = (channel[:, :, level].T.numpy() for channel in image)
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
