"""A cohort of tiny NIfTI files that is made and prepared in a second, and the main config run on it in-process."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from monai.bundle import ConfigWorkflow

CONFIG = "configs/prostate_alm.json"
COLUMNS = ("study", "patient", "label", "side", "t2", "adc", "hbv")
CAME_AS = {"t2_spacing_mm": "0.5 0.5 3", "adc_spacing_mm": "2 2 3"}  # before somebody made them tiny: good exams
COHORT_COLUMNS = (*COLUMNS, *CAME_AS)
SETTINGS: dict[str, Any] = {
    "size": [8, 8, 8],
    "spacing": [10.0, 10.0, 6.0],
    "register": False,
    "features": [2, 4],
    "norm": "instance",
    "splits": 3,
    "max_epochs": 2,
    "batch_size": 8,
    "max_fn": 0,
    "threads": 2,
}


def write_image(path: Path, rng: np.random.Generator, level: float, lesion: float) -> None:
    """8 x 24 x 24 voxels of noise about ``level``, the middle multiplied by ``lesion``."""
    array = rng.normal(level, level / 10, (8, 24, 24)).astype(np.float32)
    array[3:6, 8:16, 8:16] *= lesion
    image = sitk.GetImageFromArray(array)
    image.SetSpacing((4.0, 4.0, 6.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    sitk.WriteImage(image, str(path))


def write_cohort(folder: Path, train: int = 30, test: int = 12) -> Path:
    """Every third exam is positive: dark on T2 and on ADC, bright at high b."""
    rows = []
    for number in range(train + test):
        rng, label = np.random.default_rng(number), int(number % 3 == 0)
        name = f"S{number:02d}"
        for column, level, lesion in (("t2", 100, 0.7), ("adc", 1300, 0.6), ("hbv", 50, 2)):
            write_image(folder / name / f"{column}.nii", rng, level, lesion if label else 1)
        paths = [f"{name}/{column}.nii" for column in ("t2", "adc", "hbv")]
        rows.append([name, name, str(label), "train" if number < train else "test", *paths, *CAME_AS.values()])
    return write_manifest(folder / "manifest.csv", rows)


def write_manifest(path: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COHORT_COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def initialised(*configs: str, logging_file: Any = None, **settings: Any) -> ConfigWorkflow:
    """Shipped configs by their names, one over the other, initialised."""
    files, settings = [f"configs/{name}.json" for name in configs], {"workflow_type": "train"} | settings
    found = ConfigWorkflow(files, "configs/metadata.json", logging_file, **settings)
    found.initialize()
    return found


def workflow(manifest: Path, run_dir: Path, **overrides: Any) -> ConfigWorkflow:
    """The main config, initialised; its cache lies beside the manifest, so exams are prepared once per test session."""
    places = {"cohort": str(manifest), "cache_dir": str(manifest.parent / "cache"), "run_dir": str(run_dir)}
    return initialised("prostate_alm", **SETTINGS | places | overrides)


def inference(trained: Path, source: Path, output: Path, **overrides: Any) -> ConfigWorkflow:
    """The scoring config, initialised."""
    places = {"run_dir": str(trained), "input": str(source), "output": str(output), "salt": "s"}
    return initialised("inference", workflow_type="infer", **places | overrides)


def train(manifest: Path, run_dir: Path, **overrides: Any) -> Path:
    """The whole main job."""
    workflow(manifest, run_dir, **overrides).run()
    return run_dir


def command(manifest: Path, run_dir: Path, cache: Path, **overrides: Any) -> list[str]:
    settings = SETTINGS | {"cohort": manifest, "run_dir": run_dir, "cache_dir": cache} | overrides
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "monai.bundle", "run", "--config_file", CONFIG, *words]


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(run)): (p.stat().st_mtime_ns, p.read_bytes()) for p in run.rglob("*") if p.is_file()}
