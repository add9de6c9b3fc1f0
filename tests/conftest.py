import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import WarmPython
from small_cohort import read_rows, train, write_cohort, write_manifest

ROOT = Path(__file__).parents[1]
BROWSER = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1300,1400",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def at_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The configs' macros resolve against the working directory; the user's own state folder stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("MRI_ALM_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What a program run in this process logs to is closed with its test; no later one may write there."""

    def known() -> dict[logging.Logger, list[logging.Handler]]:
        others = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
        return {one: list(one.handlers) for one in (logging.getLogger(), *others)}

    before = known()
    yield
    for logger in known():
        logger.handlers[:] = before.get(logger, [])


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cohort of 30 training and 12 test exams, a third of each positive; not to be changed."""
    return write_cohort(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="session")
def trained(manifest: Path, tmp_path_factory: pytest.TempPathFactory, at_root: None) -> Path:
    """A finished run on it; not to be changed."""
    return train(manifest, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def one_exam(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with the last exam of it, to score; not to be changed."""
    folder, row = tmp_path_factory.mktemp("exam"), read_rows(manifest)[-1]
    images = ("t2", "adc", "hbv")
    files = [shutil.copy(manifest.parent / row[name], folder / f"{name}.nii").name for name in images]
    return write_manifest(folder / "exam.csv", [[row["study"], *files]], ("study", *images))


@pytest.fixture(scope="session")
def python(at_root: None) -> Iterator[WarmPython]:
    """A ``python`` for the programs, as a shell starts them."""
    with tempfile.TemporaryDirectory() as folder:
        python = WarmPython(Path(folder))
        server = python.warm()
        next(server)
        yield python
        server.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser for the pages that are written, as a person opens them: from the disk."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in BROWSER:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture
def narrow(browser: Any) -> Iterator[Callable[[], int]]:
    """Makes the browser's page 400 pixels wide, and tells how wide what is in it is."""

    def width() -> int:
        metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        return int(browser.execute_script("return document.documentElement.scrollWidth"))

    yield width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls a function that must leave with status 2, and gives the last paragraph it wrote to stderr."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            function(*args, **kwargs)
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text

    return run
