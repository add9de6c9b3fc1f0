"""`index.html` of scored exams: what it says of each, what it never holds, and how it works in a browser."""

import html
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.special import expit
from small_cohort import write_manifest

from mri_alm.bundle.trained_run import SCORE_COLUMNS
from mri_alm.imaging.pictures import SliceSheet
from mri_alm.scoring.page import write_scores_page

SCRIPT, IMAGE = "<script>window.hacked=1<", '"><img src=x onerror="window.hacked=1">'
THRESHOLD = expit(0.0)


def row(study: str, logit: float, **cells: Any) -> dict[str, Any]:
    """A row of scores.csv as it is before it is written."""
    score = float(expit(logit))
    found: dict[str, Any] = dict.fromkeys(SCORE_COLUMNS, "")
    found |= {"study": study, "logit": logit, "score": score, "spread": 0.5, "threshold": float(THRESHOLD)}
    return found | {"dce_needed": int(score >= THRESHOLD), "quality": "meets"} | cells


def failed(study: str, why: str) -> dict[str, Any]:
    return dict.fromkeys(SCORE_COLUMNS, "") | {"study": study, "warnings": f"NOT SCORED ({why} | Look at it."}


ROWS = [
    row("S1", -1.9),
    row("S2", 2.0, warnings=f"two T2 series {SCRIPT} | another"),
    row(IMAGE, -1.0, dce_needed=1, quality="below gate: T2 slices 6 mm (at most 4)", warnings="Quality below gate: 6."),
    failed("S#%?4", "no_t2): no T2."),
]
SHEETS = 3, 2  # slices, rows


@pytest.fixture(scope="module")
def sheet() -> SliceSheet:
    """Three slices of 8 x 8 pixels in three greys, T2 and ADC."""
    slices, rows = SHEETS
    array = np.repeat(np.repeat(np.array([[0, 120, 250], [0, 120, 250]], np.uint8), 8, axis=0), 8, axis=1)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "JPEG", quality=95)
    return SliceSheet(buffer.getvalue(), buffer.getvalue(), tuple(range(1, slices + 1)), slices, rows, 1.0)


@pytest.fixture(scope="module")
def page(sheet: SliceSheet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    (folder / "S1.png").touch()
    sheets = {"S1": sheet, "S2": sheet, IMAGE: sheet}
    notices = [f"This model was trained on synthetic exams {SCRIPT}"]
    write_scores_page(folder, ROWS, sheets, threshold="Threshold 0.5\n  Basis: x", notices=notices, keyed=True)
    return folder / "index.html"


def said(source: str) -> list[str]:
    """The decisions on a page, from the top."""
    return [html.unescape(text) for text in re.findall(r'<p class="decision \w+">(.*?)</p>', source)]


def test_decisions_in_words_the_failed_first_then_by_score(page: Path) -> None:
    assert said(page.read_text("utf-8")) == [
        "NOT SCORED (no_t2): no T2.",
        "DCE needed: the score reaches the threshold of 0.5.",
        "DCE needed whatever the score: the quality is below the gate.",
        "DCE not needed: the score is below the threshold of 0.5.",
    ]


def test_without_a_threshold_everyone_needs_it_or_nothing_is_decided(tmp_path: Path) -> None:
    rows = [row("A", 0.3, threshold=""), row("B", -0.3, threshold="", dce_needed="")]
    write_scores_page(tmp_path, rows, {}, threshold="none")
    source = (tmp_path / "index.html").read_text("utf-8")
    assert said(source) == [
        "DCE needed: there is no threshold, so every exam needs it.",
        "No decision: the model has no threshold.",
    ]
    assert re.findall(r'class="bar (\w+)"', source) == ["all", "no"]
    assert 'id="keys"' not in source  # a manifest's names are no keys


def test_scores_lie_on_a_bar_even_in_the_logit(page: Path) -> None:
    found = re.findall(r'style="((?:--\w+:[-\d.]+%;)+)"', page.read_text("utf-8"))
    places = [{k: float(v) for k, v in re.findall(r"--(\w+):([-\d.]+)%", text)} for text in found]
    # from -2.4 to 2.5, and 6 % of that beyond either end
    expected = [100 * (place + 2.694) / 5.488 for place in (2.0, 1.5, 2.5, 0.0)]
    assert list(places[0].values()) == pytest.approx(expected, abs=0.006)
    assert list(places[0]) == ["score", "low", "high", "threshold"]
    assert len(places) == 3
    assert f"<small>{expit(-2.694):.6g}</small>" in page.read_text("utf-8")


def test_a_small_threshold_is_shown_below_the_score_that_reaches_it(tmp_path: Path) -> None:
    """With four decimals 0.00125 would be 0.0013, above an exam of 0.00126 that needs DCE."""
    rows = [row("A", 0.0, score=0.00126, threshold=0.00125, dce_needed=1)]
    write_scores_page(tmp_path, rows, {}, threshold="")
    source = (tmp_path / "index.html").read_text("utf-8")
    assert said(source) == ["DCE needed: the score reaches the threshold of 0.00125."]
    assert "0.00126" in source


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_score_at_the_very_end_has_a_place(tmp_path: Path, score: float) -> None:
    write_scores_page(tmp_path, [row("A", 0.0, score=score, spread=math.inf)], {}, threshold="")
    assert "nan" not in (tmp_path / "index.html").read_text("utf-8").split("<main>")[1].split("</main>")[0]


def test_nothing_is_loaded_from_elsewhere_and_hostile_texts_are_texts(page: Path) -> None:
    source = page.read_text("utf-8")
    links = re.findall(r'(?:src|href)="([^"]*)"', source)
    assert {link for link in links if not link.startswith("data:image/jpeg;base64,")} == {
        "scores.csv", "report.json", "S1.png",
    }  # fmt: skip
    assert not re.search(r"https?://|@import|<link", source)
    assert "default-src 'none'" in source
    assert SCRIPT not in source
    assert IMAGE not in source
    assert html.escape(SCRIPT) in source
    assert "Research use only. Not a medical device." in source


def test_slices_of_many_exams_lie_beside_the_page(
    sheet: SliceSheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mri_alm.scoring.page.MOST_EMBEDDED", 1)
    names = ["S1", "a#b%20?c"]
    rows = [row(name, 0.0) for name in names]
    write_scores_page(tmp_path, rows, dict.fromkeys(names, sheet), threshold="")
    source = (tmp_path / "index.html").read_text("utf-8")
    sheets = json.loads(source.split('id="sheets">')[1].split("</script>")[0])
    assert [sheets[name]["src"] for name in names] == ["index_pictures/S1.jpg", "index_pictures/a%23b%2520%3Fc.jpg"]
    assert {path.name for path in (tmp_path / "index_pictures").iterdir()} == {f"{name}.jpg" for name in names}


# --- In a browser ---------------------------------------------------------------------------------------------------


def test_filter_order_slices_and_key_file(
    page: Path,
    browser: Any,
    narrow: Callable[[], int],
    sheet: SliceSheet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from selenium.webdriver import ActionChains, Keys

    def all_of(selector: str) -> list[Any]:
        return browser.find_elements("css selector", selector)

    def one(selector: str) -> Any:
        return browser.find_element("css selector", selector)

    def listed() -> list[str]:
        return [each.get_attribute("data-study") for each in all_of("article") if each.is_displayed()]

    browser.get(page.as_uri())
    assert listed() == ["S#%?4", "S2", IMAGE, "S1"]
    assert [each.text for each in all_of("nav button")] == [
        "all (4)", "needed (2)", "not needed (1)", "failed (1)", "warned (3)",
    ]  # fmt: skip
    for kind, expected in (
        ("needed", ["S2", IMAGE]),
        ("warned", ["S#%?4", "S2", IMAGE]),
        ("", ["S#%?4", "S2", IMAGE, "S1"]),
    ):
        one(f'nav button[data-kind="{kind}"]').click()
        assert listed() == expected
    one("#find").send_keys("two T2")
    assert listed() == ["S2"]
    one("#find").send_keys(Keys.BACKSPACE * 6)
    for order, expected in (("away", [IMAGE, "S1", "S2", "S#%?4"]), ("score", ["S#%?4", "S1", IMAGE, "S2"])):
        browser.execute_script(f"byId('order').value = '{order}'; order();")
        assert listed() == expected

    def colour() -> Any:
        picture = np.asarray(Image.open(io.BytesIO(one("#t2").screenshot_as_png)).convert("RGB")).astype(int)
        return picture[picture.shape[0] // 4, picture.shape[1] // 2]

    def number() -> str:
        return one("#slice-number").text

    one('article[data-study="S1"] .open').click()
    assert number() == "Slice 2 of 3, from the feet"
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert number() == "Slice 3 of 3, from the feet"
    browser.execute_script("panels.dispatchEvent(new WheelEvent('wheel', { deltaY: 100, cancelable: true }))")
    assert number() == "Slice 2 of 3, from the feet"
    assert not one("#hbv").is_displayed()
    assert [each.text for each in all_of("#t2 b")] == ["R", "L"]
    assert np.abs(colour() - 120).max() < 6  # the middle slice's grey
    one("#after").click()
    assert one("#viewer h2").text == IMAGE
    one("#viewer form button").click()

    keys = write_manifest(tmp_path / "keys.csv", [["S1", '/exams/Doe, "Jane"', "1.2"]], ("study", "folder", "name"))
    browser.execute_script("byId('keys').closest('details').open = true")
    one("#keys").send_keys(str(keys))
    assert one('article[data-study="S1"] .name').text == '/exams/Doe, "Jane"'
    assert one("#keys-read").text == "1 of 4 exams found in it."
    assert browser.execute_script("return window.hacked") is None
    assert narrow() == 400
    assert browser.get_log("browser") == []

    monkeypatch.setattr("mri_alm.scoring.page.MOST_EMBEDDED", 0)
    write_scores_page(tmp_path, [row("a#b", 0.0)], {"a#b": sheet}, threshold="")
    browser.get((tmp_path / "index.html").as_uri())
    one(".open").click()
    assert np.abs(colour() - 120).max() < 6  # read from beside the page
    assert browser.get_log("browser") == []
