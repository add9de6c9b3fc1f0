import base64
import html
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_inputs import write_rows
from PIL import Image
from scipy import stats
from scipy.special import expit
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait
from small_cohort import read_rows

from mri_alm.evaluation.analysis import Evaluation, evaluate
from mri_alm.evaluation.data import HardExam
from mri_alm.evaluation.figures import forest_figure, score_figure
from mri_alm.evaluation.model_card import LEFT_TO_AUTHORS, _selection, checklist
from mri_alm.evaluation.page import write_html_report
from mri_alm.evaluation.report import pictures_beside, write_evaluation

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = '"><img src=x onerror="window.hacked=1">'
FORMULA = "=cmd|' /C calc'!A0"


@pytest.fixture(scope="module")
def evaluation(trained: Path, manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The run's test cohort under hostile names, by two models, with a picture, a warning and subgroups."""
    folder = tmp_path_factory.mktemp("hostile")
    rows, truth = read_rows(trained / "scores.csv"), read_rows(manifest)
    names = {rows[0]["study"]: SCRIPT, rows[1]["study"]: IMAGE, rows[2]["study"]: FORMULA}
    for row in (*rows, *truth):
        row["study"] = names.get(row["study"], row["study"])
    for i, row in enumerate(truth):
        row["vendor"] = IMAGE if i % 2 else "B & W"
        row["grade"] = str(1 + (i + int(row["label"])) % 4)
    rows[3]["warnings"] = f"two T2 series {SCRIPT}"
    other = [dict(row, score=str(1 - float(row["score"])), dce_needed="", threshold="") for row in rows]
    for row in other:
        row["dce_needed"] = "1"
    Image.new("RGB", (900, 900), "teal").save(folder / f"{rows[4]['study']}.png")
    return evaluate(
        {"run": write_rows(folder / "scores.csv", rows), IMAGE: write_rows(folder / "other.csv", other)},
        write_rows(folder / "labels.csv", truth),
        run=trained,
        reader="grade",
        draws=100,
        pictures=lambda studies: pictures_beside(folder, studies),
    )


@pytest.fixture(scope="module")
def page(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_evaluation(folder, evaluation)
    return folder / "report.html"


# --- The source -----------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of the elements that have an id."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)
        self.text += f"{data} "


@pytest.fixture(scope="module")
def source(page: Path) -> str:
    return page.read_text("utf-8")


def test_nothing_is_loaded_from_elsewhere(source: str) -> None:
    for tag, attributes in Elements(source).tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("#", "data:image/jpeg;base64,")), (tag, value[:80])
    assert source.count("default-src 'none'") == 1
    assert len(re.findall(r"plotly\.js v\d", source)) == 1


def test_hostile_names_are_text(source: str) -> None:
    page = Elements(source)
    assert not any(a.get("onerror") or a.get("src") == "x" for _, a in page.tags)
    assert [a.get("id") or "" for tag, a in page.tags if tag == "script"] == ["report-data", "", ""]
    for name in (SCRIPT, IMAGE):
        assert name not in source
        assert html.escape(name, quote=False).replace('"', "&#34;") in source


def test_the_page_says_what_it_is(source: str) -> None:
    text = " ".join(Elements(source).text.split())
    assert "Research use only. Not a medical device." in text
    assert "every number below is an evaluation ." in text
    assert "Nothing chosen here is an operating point to ship." in text
    assert "FPRs take their threshold from these very labels: evaluation, not an operating point." in text


def test_no_place_on_the_machine_is_shown(source: str, trained: Path, manifest: Path) -> None:
    for place in (trained, manifest.parent, Path.cwd(), Path.home()):
        assert len(place.parts) < 3 or str(place) not in source


def test_csv_tables_hold_no_formula(page: Path) -> None:
    cells = [row["study"] for row in read_rows(page.parent / "tables" / "patients.csv")]
    assert f"'{FORMULA}" in cells
    assert FORMULA not in cells


def test_model_card_has_versions_hashes_and_every_item(evaluation: Evaluation, source: str, trained: Path) -> None:
    text = " ".join(Elements(source).text.split())
    threshold = json.loads((trained / "threshold.json").read_text())
    for digest in (*threshold["checkpoints"].values(), evaluation.data.sha256, evaluation.data.models[0].sha256):
        assert digest in text
    items = checklist(evaluation)
    assert [item["item"] for item in items if item["guide"] == "CLAIM 2024"] == [str(i) for i in range(1, 45)]
    assert [item["item"] for item in items if item["guide"] == "TRIPOD+AI 2024"] == [str(i) for i in range(1, 28)]
    unknown = sum(item["text"] == LEFT_TO_AUTHORS for item in items)
    assert text.count(LEFT_TO_AUTHORS) == unknown > 20
    assert f"{71 - unknown} of 71 items filled" in text
    assert "30 exams, 10 need DCE." in text


def test_the_cohort_adds_up(evaluation: Evaluation, source: str) -> None:
    text = " ".join(Elements(source).text.split())
    for row in ("Rows of the label table 42", "Left out: training study 30", "Evaluated 12 4 need contrast, 8 do not"):
        assert row in text
    assert "Evaluated with a quality warning 1" in text
    flow = "42 rows of the label table 30 left out 30 training study 12 evaluated 4 need contrast, 8 do not"
    assert flow in text
    assert f"Patients of it held out once or more {evaluation.run.held_out[0].size}" in text


def test_without_a_run_nothing_of_training_is_claimed(evaluation: Evaluation, page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    data = evaluation.data
    rows = [{"study": s, "score": x} for s, x in zip(data.studies, data.models[0].score, strict=True)]
    truth = [{"study": s, "label": y} for s, y in zip(data.studies, data.label, strict=True)]
    plain = evaluate({"m": write_rows(folder / "s.csv", rows)}, write_rows(folder / "l.csv", truth), draws=100)
    write_evaluation(tmp_path / "out", plain)
    text = Elements((tmp_path / "out" / "report.html").read_text("utf-8")).text
    assert "No training run was given (--run): unknown to this report." in text
    assert "No operating point was given." in text
    assert 'id="training"' not in (tmp_path / "out" / "report.html").read_text("utf-8")
    known = {item["topic"] for item in checklist(plain) if item["text"] != LEFT_TO_AUTHORS}
    assert known.isdisjoint({"Training", "The model", "How data were partitioned", "Software and versions"})


@pytest.mark.parametrize(
    ("label", "score"),
    [([1, 0], [0.5, 0.5]), ([1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4]), ([1] * 150 + [0], [7.0] * 151)],
    ids=["a tie of two", "one positive, lowest", "one negative, all tied, no probabilities"],
)
def test_the_smallest_cohorts_have_a_page(label: list[int], score: list[float], tmp_path: Path) -> None:
    rows = [{"study": f"S{i}", "score": x, "label": y} for i, (x, y) in enumerate(zip(score, label, strict=True))]
    path = write_rows(tmp_path / "both.csv", rows)
    write_evaluation(tmp_path, evaluate({"a": path, "b": path}, path, draws=100))
    embedded = re.search(r'id="report-data">(.*?)</script>', (tmp_path / "report.html").read_text("utf-8"))
    steps = json.loads(embedded[1], parse_constant=pytest.fail)["trade_offs"][0]["steps"]
    assert len(steps) == min(sum(label), 101) + 1
    assert steps[0]["spared"] == steps[1]["spared"] == "0.0"


def test_names_in_figures_are_escaped(evaluation: Evaluation) -> None:
    figure = score_figure(evaluation.data, evaluation.data.models[0])
    texts = figure["data"][1]["text"]
    assert len(texts) == 4
    assert all("<" not in text for text in texts)


def test_the_hardest_training_exams_have_rows_and_pictures(evaluation: Evaluation, tmp_path: Path) -> None:
    hardest = HardExam(SCRIPT, 0.5, 2), HardExam("T1", 0.25, 3)
    pictures = {"T1": b"a picture"}
    write_html_report(tmp_path / "report.html", replace(evaluation, hardest=hardest, pictures=pictures))
    source = (tmp_path / "report.html").read_text("utf-8")
    assert f"{SCRIPT} 0.50 2 – T1 0.25 3" in " ".join(Elements(source).text.split())
    assert f"base64,{base64.b64encode(b'a picture').decode()}" in source


def test_every_group_and_the_whole_stand_in_the_forest(evaluation: Evaluation) -> None:
    figure = forest_figure(evaluation.groups, evaluation.performances, "auc")
    rows = figure["layout"]["yaxis"]["ticktext"]
    assert rows[0] == "all exams"
    assert len(rows) == 3
    assert all("<" not in row for row in rows)
    for trace, (model, whole) in zip(figure["data"], evaluation.performances.items(), strict=True):
        of_groups = [g.performance.figures["auc"] for g in evaluation.groups if g.model == model and g.performance]
        for i, estimate in enumerate([whole.figures["auc"], *of_groups]):
            assert trace["x"][i] == pytest.approx(100 * estimate.value)
            assert trace["x"][i] + trace["error_x"]["array"][i] == pytest.approx(100 * estimate.high)
            assert trace["x"][i] - trace["error_x"]["arrayminus"][i] == pytest.approx(100 * estimate.low)
            assert round(trace["y"][i]) == i


def test_several_runs_have_a_learning_curve(trained: Path, manifest: Path, tmp_path: Path) -> None:
    """A curve where the models' folders say how many exams they were trained on, and these differ."""
    rows, scores = read_rows(trained / "splits.csv"), read_rows(trained / "scores.csv")
    files = {}
    for name, share in ((IMAGE, 0.5), ("all", 1)):
        folder = tmp_path / str(share)
        write_rows(folder / "splits.csv", rows[: round(share * len(rows))])
        files[name] = write_rows(folder / "scores.csv", scores)
    evaluation = evaluate(files, manifest, draws=100)
    positives = [sum(row["label"] == "1" for row in rows[:end]) for end in (len(rows) // 2, len(rows))]
    assert evaluation.trained_on == {IMAGE: (len(rows) // 2, positives[0]), "all": (len(rows), positives[1])}
    write_evaluation(tmp_path / "out", evaluation)
    source = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (line,) = json.loads(re.search(r'id="report-data">(.*?)</script>', source)[1])["figures"]["learning"]["data"]
    auc = 100 * evaluation.performances["all"].figures["auc"].value
    assert (line["x"], line["y"]) == ([len(rows) // 2, len(rows)], [auc, auc])
    assert "<img" not in line["text"][0]
    assert line["text"][1] == f"all: {positives[1]} of {len(rows)} need contrast"
    assert 'id="learning"' in source
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))["models"]
    assert found["all"]["training_exams"] == [len(rows), positives[1]]
    for text in ("name,part\nS00,1\n", "study,patient,label\nS00,S00,high\n"):  # no run's, though it has the name
        (tmp_path / "0.5" / "splits.csv").write_text(text, encoding="utf-8")
        assert list(evaluate(files, manifest, draws=100).trained_on) == ["all"]
    for one in (evaluate({"all": files["all"]}, manifest, draws=100), evaluate(files, manifest, draws=100)):
        write_evaluation(tmp_path / "none", one)
        assert 'id="learning"' not in (tmp_path / "none" / "report.html").read_text(encoding="utf-8")


def test_the_main_job_writes_its_report(trained: Path) -> None:
    source = (trained / "report.html").read_text("utf-8")
    studies = [row["study"] for row in read_rows(trained / "scores.csv")]
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', source)
    assert len(pictures) == len(studies) == 12
    with Image.open(io.BytesIO(base64.b64decode(pictures[0]))) as picture:
        assert picture.format == "JPEG"
        assert picture.size == (540, 180)
    assert all(f'<th scope="row">{study}</th>' in source for study in studies)


def test_pictures_outside_the_folder_are_not_taken(tmp_path: Path) -> None:
    Image.new("RGB", (1000, 500)).save(tmp_path / "outside.png")
    (tmp_path / "inside").mkdir()
    Image.new("RGB", (1000, 500)).save(tmp_path / "inside" / "S1.png")
    (tmp_path / "inside" / "S2").mkdir()
    Image.new("RGB", (100, 50)).save(tmp_path / "inside" / "S2" / "qc.jpg")
    found = pictures_beside(tmp_path / "inside", ["S1", "S2", "S3", "../outside"])
    assert set(found) == {"S1", "S2"}
    with Image.open(io.BytesIO(found["S1"])) as picture:
        assert picture.size == (720, 360)


# --- The page in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(browser: webdriver.Chrome, page: Path) -> webdriver.Chrome:
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of the pages before
    browser.get(page.as_uri())
    WebDriverWait(browser, 30).until(lambda c: len(c.find_elements(By.CSS_SELECTOR, ".plot .main-svg")) >= 11)
    return browser


@pytest.fixture
def reloaded(opened: webdriver.Chrome) -> webdriver.Chrome:
    opened.refresh()
    WebDriverWait(opened, 30).until(lambda c: c.find_elements(By.CSS_SELECTOR, "#training-0 .main-svg"))
    return opened


def shown(browser: webdriver.Chrome, key: str) -> str:
    """The one text that stands in every place of a number."""
    (text,) = {e.get_attribute("textContent") for e in browser.find_elements(By.CSS_SELECTOR, f"[data-step={key}]")}
    return str(text)


def marker(browser: webdriver.Chrome, figure: str) -> tuple[float, float]:
    x, y = browser.execute_script(
        "const plot = document.getElementById(arguments[0]); const trace = plot.data[plot.layout.meta.marker];"
        "return [trace.x[0], trace.y[0]];",
        figure,
    )
    return x, y


def check_step(browser: webdriver.Chrome, evaluation: Evaluation, on: tuple[Any, Any], rank: int) -> None:
    """The page's numbers against NumPy's and SciPy's."""
    data = evaluation.data
    y, s = data.label, data.models[0].score
    positives = np.sort(on[1][on[0] == 1])
    n = positives.size
    threshold = -np.inf
    if rank:  # halfway to the next lower score of either class
        at, lower = positives[rank - 1], on[1][on[1] < positives[rank - 1]]
        threshold = (at + (lower.max() if lower.size else at * (1 - 2e-4))) / 2
    missed = [study for study, a, b in zip(data.studies, y, s, strict=True) if a and b < threshold]
    wanted = "Examine everyone" if rank == 0 else f"{rank - 1} false negative{'' if rank == 2 else 's'} allowed"
    assert shown(browser, "allowed") == wanted
    assert browser.find_element(By.ID, "allowed").get_attribute("aria-valuetext") == wanted
    assert shown(browser, "threshold") == (f"{threshold:.6g}" if rank else "none")
    assert shown(browser, "spared") == f"{100 * np.mean(s < threshold):.1f}"
    assert shown(browser, "missed") == f"{len(missed)} of 4"
    assert shown(browser, "new") == "33"
    assert shown(browser, "expected") == (f"{33 * rank / (n + 1):.1f}" if rank else "0.0")
    assert shown(browser, "expected_rate") == f"{100 * rank / (n + 1):.1f} %"
    bound = stats.beta.ppf(0.95, rank, n - rank + 1) if rank else 0
    assert shown(browser, "upper_rate") == f"{100 * bound:.1f} %"
    point = (np.mean(s[y == 0] >= threshold), np.mean(s[y == 1] >= threshold))
    WebDriverWait(browser, 10).until(lambda c: marker(c, "roc") == pytest.approx(point))
    assert marker(browser, "roc-high") == pytest.approx(point)
    for figure in ("scores", "decision"):
        line = browser.execute_script("return document.getElementById(arguments[0]).layout.shapes[0]", figure)
        assert line["visible"] == (rank > 0)
        assert rank == 0 or line["x0"] == pytest.approx(threshold)
    check_outcomes(browser, evaluation, s >= threshold)


OUTCOMES = {(1, True): "examined", (0, True): "needless", (1, False): "missed", (0, False): "spared"}


def check_outcomes(browser: webdriver.Chrome, evaluation: Evaluation, needed: np.ndarray) -> None:
    """Matrix, table of patients and galleries show the slider's decisions."""
    data = evaluation.data
    exams = sorted(
        zip(data.models[0].score.tolist(), data.studies, data.label.tolist(), needed.tolist(), strict=True),
        key=lambda exam: -exam[0],
    )
    words = [OUTCOMES[label, asked] for _, _, label, asked in exams]
    assert column(browser, 6) == words
    assert column(browser, 5) == [f"DCE {'' if asked else 'not '}needed" for *_, asked in exams]
    for word in OUTCOMES.values():
        assert shown(browser, f"n_{word}") == str(words.count(word))
    assert shown(browser, "n_asked") == str(needed.sum())
    assert shown(browser, "n_not_asked") == str((~needed).sum())
    for word, worst_first in (("missed", -1), ("needless", 1)):
        names = [study for (_, study, _, _), its in zip(exams, words, strict=True) if its == word][::worst_first]
        assert gallery(browser, word) == names[:8]


def gallery(browser: webdriver.Chrome, word: str) -> list[str]:
    links = browser.find_elements(By.CSS_SELECTOR, f"[data-gallery={word}] a")
    return [str(link.get_attribute("textContent")) for link in links]


def test_the_slider_by_keyboard(reloaded: webdriver.Chrome, evaluation: Evaluation, trained: Path) -> None:
    held_out = read_rows(trained / "heldout.csv")
    on = np.array([int(r["label"]) for r in held_out]), expit(np.array([float(r["logit"]) for r in held_out]))
    slider = reloaded.find_element(By.ID, "allowed")
    check_step(reloaded, evaluation, on, json.loads((trained / "threshold.json").read_text())["rank"])
    slider.send_keys(Keys.HOME)
    check_step(reloaded, evaluation, on, 0)
    n = int(on[0].sum())
    for rank in range(1, n + 1):
        slider.send_keys(Keys.ARROW_RIGHT)
        check_step(reloaded, evaluation, on, rank)
    slider.send_keys(Keys.ARROW_RIGHT)
    check_step(reloaded, evaluation, on, n)


def test_the_threshold_may_be_set_on_the_evaluated_exams(reloaded: webdriver.Chrome, evaluation: Evaluation) -> None:
    on = evaluation.data.label, evaluation.data.models[0].score
    reloaded.find_element(By.CSS_SELECTOR, "[value=held_out]").send_keys(Keys.ARROW_DOWN)
    assert reloaded.find_element(By.CSS_SELECTOR, "[value=evaluated]").is_selected()
    check_step(reloaded, evaluation, on, 1)
    notes = {e.get_attribute("data-basis"): e.is_displayed() for e in reloaded.find_elements(By.CLASS_NAME, "basis")}
    assert notes == {"held_out": False, "evaluated": True}
    slider = reloaded.find_element(By.ID, "allowed")
    slider.send_keys(Keys.END)
    check_step(reloaded, evaluation, on, 4)
    slider.send_keys(Keys.ARROW_LEFT)
    check_step(reloaded, evaluation, on, 3)


def column(browser: webdriver.Chrome, number: int) -> list[str]:
    rows: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('#patient-table tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.cells[arguments[0]].textContent.trim())",
        number,
    )
    return rows


def heads(browser: webdriver.Chrome) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, "#patient-table thead button")


def test_the_table_sorts_by_keyboard(reloaded: webdriver.Chrome, evaluation: Evaluation) -> None:
    scores = evaluation.data.models[0].score
    assert column(reloaded, 2) == [f"{x:.6g}" for x in sorted(scores, reverse=True)]
    heads(reloaded)[2].send_keys(Keys.ENTER)
    assert column(reloaded, 2) == [f"{x:.6g}" for x in sorted(scores)]
    first = dict(zip(evaluation.data.studies, scores, strict=True))
    assert column(reloaded, 0) == sorted(first, key=lambda study: first[study])
    headers = reloaded.find_elements(By.CSS_SELECTOR, "#patient-table thead th")
    assert [h.get_attribute("aria-sort") for h in headers].count("ascending") == 1
    assert headers[2].get_attribute("aria-sort") == "ascending"
    heads(reloaded)[2].send_keys(Keys.SPACE)
    assert headers[2].get_attribute("aria-sort") == "descending"
    heads(reloaded)[1].click()
    assert column(reloaded, 1) == ["does not"] * 8 + ["needs DCE"] * 4


def test_the_table_filters(reloaded: webdriver.Chrome, evaluation: Evaluation) -> None:
    count = reloaded.find_element(By.ID, "count")
    assert count.text == "12 of 12 exams"
    find = reloaded.find_element(By.ID, "find")
    find.send_keys("TWO T2")
    assert column(reloaded, 6 + 1) == [f"two T2 series {SCRIPT}"]
    assert count.text == "1 of 12 exams"
    find.send_keys(Keys.CONTROL, "a")
    find.send_keys(Keys.BACKSPACE)
    show = Select(reloaded.find_element(By.ID, "show"))
    model = evaluation.data.models[0]
    reloaded.find_element(By.ID, "allowed").send_keys(Keys.END)
    of_slider = column(reloaded, 6)
    Select(reloaded.find_element(By.ID, "decisions")).select_by_value("file")
    by_file = [OUTCOMES[y, z] for y, z in zip(evaluation.data.label, model.score >= model.threshold, strict=True)]
    assert column(reloaded, 6) != of_slider
    for word in OUTCOMES.values():
        show.select_by_visible_text(word)
        assert column(reloaded, 6) == [word] * by_file.count(word)
        assert count.text == f"{by_file.count(word)} of 12 exams"
    show.select_by_value("warned")
    assert count.text == "1 of 12 exams"


def test_numbers_and_pictures_lead_to_rows(reloaded: webdriver.Chrome, evaluation: Evaluation) -> None:
    reloaded.find_element(By.ID, "allowed").send_keys(Keys.END)
    reloaded.find_element(By.CSS_SELECTOR, "[data-show=missed]").click()
    missed = gallery(reloaded, "missed")
    assert column(reloaded, 0) == missed[::-1]
    link = reloaded.find_element(By.CSS_SELECTOR, "[data-gallery=missed] a")
    link.send_keys(Keys.ENTER)
    assert len(column(reloaded, 0)) == 12
    row = reloaded.find_element(By.CSS_SELECTOR, "tr:target")
    assert row.find_element(By.TAG_NAME, "th").text == missed[0]
    assert row.is_displayed()


def test_a_dark_page_has_dark_figures(reloaded: webdriver.Chrome) -> None:
    """Contrast by WCAG's formula of the page's text, and of the figures' text, on what is behind it."""

    def colours() -> tuple[list[float], ...]:
        found: list[str] = reloaded.execute_script(
            "const plot = document.getElementById('roc'); const body = getComputedStyle(document.body);"
            "return [body.color, body.backgroundColor, getComputedStyle(plot.querySelector('.xtitle')).fill,"
            "getComputedStyle(plot.querySelector('.main-svg')).backgroundColor]"
        )
        return tuple([int(x) for x in re.findall(r"\d+", one)[:3]] for one in found)

    def luminance(rgb: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(rgb) / 255]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for scheme, is_dark in (("dark", True), ("light", False)):
        reloaded.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        WebDriverWait(reloaded, 10).until(lambda _, dark=is_dark: (luminance(colours()[3]) < 0.2) == dark)
        text, page, title, plot = map(luminance, colours())
        assert page == plot
        for ink in (text, title):
            assert (max(ink, page) + 0.05) / (min(ink, page) + 0.05) > 7
            assert (ink > page) == is_dark


def test_hostile_names_do_nothing(reloaded: webdriver.Chrome) -> None:
    assert {SCRIPT, IMAGE, FORMULA} <= set(column(reloaded, 0))
    assert reloaded.execute_script("return window.hacked") is None
    assert reloaded.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
    assert IMAGE in reloaded.find_element(By.TAG_NAME, "header").text


def test_a_picture_is_enlarged_and_closed_by_keyboard(reloaded: webdriver.Chrome) -> None:
    (thumb,) = reloaded.find_elements(By.CSS_SELECTOR, "#patient-table .thumb")
    dialog = reloaded.find_element(By.ID, "enlarged")
    assert not dialog.is_displayed()
    thumb.send_keys(Keys.ENTER)
    assert dialog.is_displayed()
    name = thumb.find_element(By.XPATH, "./ancestor::tr/th").text
    assert dialog.find_element(By.TAG_NAME, "p").text == name
    ActionChains(reloaded).send_keys(Keys.ESCAPE).perform()
    assert not dialog.is_displayed()


WIDE = """return [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, nav, svg")
    && e.getBoundingClientRect().right > document.documentElement.clientWidth).map(e => e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_its_window(reloaded: webdriver.Chrome, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reloaded.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    fits = "const page = document.documentElement; return page.scrollWidth <= page.clientWidth"
    WebDriverWait(reloaded, 10).until(lambda c: c.execute_script(fits), reloaded.execute_script(WIDE))
    reloaded.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_control_can_be_reached_and_has_a_name(reloaded: webdriver.Chrome) -> None:
    for element in reloaded.find_elements(By.CSS_SELECTOR, "input, select, button, [role=region], [role=img]"):
        if element.is_displayed():  # not in a table that is still folded
            assert element.accessible_name, element.get_attribute("outerHTML")
    assert reloaded.execute_script("return document.querySelectorAll('[tabindex]').length") > 3
    assert not reloaded.find_elements(By.CSS_SELECTOR, "[tabindex='1'], [onclick]")


def test_paper_gets_every_table_and_figures_that_fit(reloaded: webdriver.Chrome) -> None:
    reloaded.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert all(d.get_attribute("open") for d in reloaded.find_elements(By.TAG_NAME, "details"))
    width = "return document.querySelector('#roc .main-svg').getBoundingClientRect().width"
    WebDriverWait(reloaded, 10).until(lambda c: c.execute_script(width) <= 660)


def test_no_error_and_no_request(reloaded: webdriver.Chrome, page: Path) -> None:
    """Last in this file, so that it covers everything done above."""
    assert reloaded.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in reloaded.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith(("data:", "blob:"))} == {page.as_uri()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_epochs": 60}, "epoch of best validation AUC of at most 60, rule best."),
        ({"max_epochs": 60, "checkpoint_rule": "official", "ema": 0.0},
         "epoch of best validation AUC of at most 60, rule official."),
        ({"max_epochs": 25, "checkpoint_rule": "last", "ema": 0.99},
         "last of 25 epochs, rule last, weights averaged over steps (exponential, decay 0.99)."),
    ],
)  # fmt: skip
def test_the_model_card_says_which_weights_are_kept(settings: dict[str, Any], said: str) -> None:
    assert _selection(settings) == said
