"""Make docs/pictures/: the page of scored exams, the QC page and the report, wide and narrow, light and dark.

    python docs/screenshots.py

The model and its report are those of `make demo`. Eight phantoms are made, scored and prepared in build/screenshots/
the first time, and kept there; delete the folder to make them anew. Needs Chromium, its driver, the tests' packages.
"""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).parents[1]
WORK, PICTURES = ROOT / "build" / "screenshots", ROOT / "docs" / "pictures"
EXAMS, COHORT, SCORES = (WORK / name for name in ("exams", "cohort", "scores"))
RUN = ROOT / "runs" / "demo"
LARGEST = 150_000  # bytes
SIZES = {1400: 1000, 400: 850}  # pixels
PAGES: dict[str, tuple[Path, str]] = {  # name: (page, what is pressed first)
    "scores": (SCORES / "index.html", ""),
    "slices": (SCORES / "index.html", "document.querySelector('.open').click()"),
    "qc": (COHORT / "qc.html", "choices = {}; choose(studies[3][0], 'leave')"),
    "report": (RUN / "report.html", ""),
}


def make(place: Path, *words: Any) -> None:
    """Start a program that makes a folder, unless it is there. Exit status 2: an exam failed, as one must here."""
    if not place.exists():
        environment = os.environ | {"MRI_ALM_STATE": str(WORK / "state")}  # keys by a secret of its own
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=environment, check=False)
        if done.returncode not in (0, 2):
            sys.exit(f"{' '.join(map(str, words))} ended with status {done.returncode}.")


def prepare() -> None:
    """Eight exams of which one has no diffusion, their scores and their cohort."""
    if not (RUN / "report.html").exists():
        sys.exit(f"{RUN} holds no finished run. Start make demo first.")
    make(EXAMS, "pipelines/make_phantom.py", EXAMS, "--train", 3, "--test", 5, "--seed", 1, "--form", "dicom")
    for series in (EXAMS / "studies" / "phantom_0007").iterdir():
        if "diff" in series.name:
            shutil.rmtree(series)
    exams = ["--input", EXAMS / "studies"]
    make(SCORES, "pipelines/score.py", "--model", RUN, *exams, "--output", SCORES)
    make(COHORT, "pipelines/prepare_cohort.py", *exams, "--output", COHORT)


def small(picture: bytes) -> bytes:
    """A screenshot as WebP, below the largest size."""
    for quality in (80, 65, 50):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(picture)).save(buffer, "WEBP", quality=quality, method=6)
        if buffer.tell() < LARGEST:
            return buffer.getvalue()
    sys.exit("A screenshot has more than 150 kB.")


def photograph(browser: Any) -> None:
    """Write every page in every form."""
    PICTURES.mkdir(exist_ok=True)
    for name, (page, script) in PAGES.items():
        for width, height in SIZES.items():
            for scheme in ("light", "dark"):
                metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                browser.get(page.as_uri())
                browser.execute_script(script)
                browser.execute_async_script("setTimeout(arguments[0], 1500)")  # figures are drawn
                path = PICTURES / f"{name}_{width}_{scheme}.webp"
                path.write_bytes(small(browser.get_screenshot_as_png()))
                print(f"{path.relative_to(ROOT)}  {path.stat().st_size} bytes")


def main() -> None:
    """Make what is shown, then show it."""
    prepare()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        photograph(browser)
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
