"""The QC page in a browser, as a person opens it: from the disk, without network."""

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exams import dicom_exam, prepare, write_text
from PIL import Image

from mri_alm.imaging.pictures import study_strip


def large_width(browser: Any) -> int:
    """Pixels of the enlarged picture, when it is there."""
    script = (
        "const [done] = arguments, look = () => large.naturalWidth ? done(large.naturalWidth) : setTimeout(look, 9);"
    )
    width: int = browser.execute_async_script(f"{script} look();")
    return width


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three studies: one whole, one with a warning, one failed."""
    root = tmp_path_factory.mktemp("qc")
    dicom_exam(root / "in" / "a", 0)
    dicom_exam(root / "in" / "b", 1)
    dicom_exam(root / "in" / "c", 2, without=(4,))
    labels = write_text(root / "labels.csv", "patient,label\nP0,1\nP2,0\n<script>alert(1)</script>,0\n")
    prepare(root / "in", root / "cohort", labels=labels)
    return root / "cohort" / "qc.html"


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.findall(r'(?:src|href)="(?!data:image/jpeg;base64,)[^"]*"', text) == []
    assert not re.search(r"https?://|url\(|@import|<link", text)


def test_pictures_figures_filters_and_search(page: Path, browser: Any) -> None:
    from selenium.webdriver import Keys
    from selenium.webdriver.common.by import By as by  # noqa: N813

    browser.get(page.as_uri())
    studies = browser.find_elements(by.TAG_NAME, "article")
    assert [one.get_attribute("data-state") for one in studies] == ["failed", "warn", "ok"]
    pictures = browser.find_elements(by.CSS_SELECTOR, "article img")
    browser.execute_script("arguments[0].forEach(i => i.loading = 'eager')", pictures)
    browser.set_script_timeout(10)
    sizes = [
        browser.execute_async_script(
            "const [i, done] = arguments; i.decode().then(() => done([i.naturalWidth, i.naturalHeight]))", one
        )
        for one in pictures
    ]
    assert sizes == [[640, 480]] * 2
    assert "no_t2: " in studies[0].text
    assert "No label in the label table." in studies[1].text
    for part in ("label, side 1, train", "registration accepted", "b-values 50 800; high b 1400", "siemens"):
        assert part in studies[2].text

    def shown() -> list[str]:
        return [one.get_attribute("data-state") for one in studies if one.is_displayed()]

    for state, expected in (("ok", ["ok"]), ("failed", ["failed"]), ("all", ["failed", "warn", "ok"])):
        browser.find_element(by.CSS_SELECTOR, f"button[data-state={state}]").click()
        assert shown() == expected
        assert browser.find_element(by.ID, "shown").text == f"{len(expected)} shown"
    browser.find_element(by.ID, "search").send_keys("label table")
    assert shown() == ["warn"]
    browser.find_element(by.ID, "search").send_keys(Keys.BACKSPACE * 11)

    def press(selector: str) -> None:
        browser.find_element(by.CSS_SELECTOR, selector).click()

    left_out, setting = browser.find_element(by.ID, "left-out"), browser.find_element(by.ID, "exclude")
    names = [one.get_attribute("data-study") for one in studies]
    assert [len(one.find_elements(by.CSS_SELECTOR, ".leave")) for one in studies] == [0, 1, 1]
    assert not left_out.is_displayed()
    press("article[data-state=ok] .enlarge")
    assert large_width(browser) == 1024  # the one of the study's folder
    press("#enlarged .leave")
    press("#before")
    assert browser.find_element(by.CSS_SELECTOR, "#enlarged h2").text == names[1]
    press("#enlarged form button")
    assert setting.get_attribute("value") == f"--exclude \"['{names[2]}']\""
    press("button[data-state=open]")
    assert shown() == ["warn"]
    press("article[data-state=warn] .leave")
    assert setting.get_attribute("value") == f"--exclude \"['{names[1]}', '{names[2]}']\""
    press("#copy")
    browser.refresh()  # remembered
    studies = browser.find_elements(by.TAG_NAME, "article")
    press("article[data-state=ok] .keep")
    assert browser.find_element(by.ID, "exclude").get_attribute("value") == f"--exclude \"['{names[1]}']\""
    press("article[data-state=warn] .leave")  # again: undecided
    assert not browser.find_element(by.ID, "left-out").is_displayed()
    assert browser.get_log("browser") == []


def test_a_page_without_its_folders_enlarges_what_it_has(
    page: Path, browser: Any, narrow: Callable[[], int], tmp_path: Path
) -> None:
    browser.get(Path(shutil.copy(page, tmp_path)).as_uri())
    browser.find_element("css selector", ".enlarge").click()
    assert large_width(browser) == 640
    assert narrow() == 400
    (missing,) = browser.get_log("browser")  # read, as tests that follow look into it
    assert "qc.jpg" in missing["message"]


def test_the_strip_shows_all_images_of_any_size() -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.uniform(1, 2000, (5, 12, 16)).astype(np.float32) for name in ("t2", "adc", "hbv")}
    arrays["valid"] = np.ones((5, 12, 16), np.float32)
    picture = Image.open(io.BytesIO(study_strip(arrays, (2.0, 2.0, 3.0))))
    assert picture.size == (4 * 256, 3 * 192)
    arrays |= dict.fromkeys(("t2", "hbv"), np.zeros((5, 12, 16), np.float32))
    black = np.asarray(Image.open(io.BytesIO(study_strip(arrays, (2.0, 2.0, 3.0)))))
    assert black[32:160, 544:736].max() < 10  # the high-b panel of an empty image
