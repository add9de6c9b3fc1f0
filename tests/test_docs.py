"""What the documentation shows runs as written, and what it points to is there."""

import ast
import doctest
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard
from urllib.parse import unquote

import pytest
import torch
from pages import COMMAND, PAGE_IDS, PAGES, ROOT, Checkout, blocks
from small_cifar import write_cifar10
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mri_alm
from mri_alm.metrics.ranking import auc

TUTORIAL = ROOT / "docs" / "tutorial.md"
# Why a block is not run. Every reason is also a promise to the reader: what it needs.
REASONS = (
    "makes the environment that these pages are tested in",
    "needs a container engine",
    "needs a public archive",
    "needs exams that are not in the repository",
    "needs Lightning or Transformers",
    "needs two processes for one model; tests/alm/test_processes.py runs them",
    "builds for a minute; CI runs it",
    "asks a service on the network; CI does not",
    "downloads a schema; tests/bundle/test_zoo.py runs it with one of its own",
    "starts a server",
    "trains thirteen networks for many minutes; tests/training/test_partition.py trains five",
    "changes the reader's shell",
    "needs SLURM; tests/test_slurm.py runs it with a stand-in",
    "the loop's model and data are the reader's; a test of its own runs it",
    "measures for minutes or hours",
    "needs the CIFAR archives",
    "trains for minutes; tests/cifar/test_search.py searches a small table",
    "needs a cluster, Ray or several GPUs",
    "needs a package that is not in the lock; tests/test_localiser.py has a stand-in",
)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout in which the tutorial has been run from end to end; its cohort and its model serve the other pages."""
    site = Checkout(tmp_path_factory.mktemp("site"))
    write_cifar10(site.root / "data" / "small_cifar", 420)  # what a hundred to one, and its validation, need
    server = site.warm()
    next(server)
    site.run(TUTORIAL)
    yield site
    server.close()


@pytest.mark.slow
def test_the_tutorial_ends_with_what_it_promises(checkout: Checkout) -> None:
    for name in (
        "data/mine/qc.html",
        "data/secret_keys.csv",
        "runs/mine/report.html",
        "runs/mine/threshold.json",
        "scores/new/scores.csv",
        "evaluation/evaluation.json",
        "evaluation/report.html",
    ):
        assert (checkout.root / name).stat().st_size > 0, name
    point = json.loads((checkout.root / "scores/sure/report.json").read_text())["threshold"]
    assert point["threshold"] is None, "so few positives can only examine everyone, as the page says"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_the_commands_of_a_page_run(page: Path, checkout: Checkout) -> None:
    checkout.run(page)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("bash", "python"):
            reason = block.notes.get("not run", REASONS[0])
            assert reason in REASONS, f"{block.place}: not one of the reasons in tests/test_docs.py"
        elif block.language in ("sh", "shell", "console", "") and not block.title:
            assert not COMMAND.search(block.text), f"{block.place}: a command in a block that is not marked as bash"
    outside = re.sub(r"^( *)```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    indented = [line for line in outside.splitlines() if line.startswith("    ") and COMMAND.match(line)]
    assert indented == [], "commands belong into blocks marked as bash"


def test_most_blocks_are_run() -> None:
    found = [b for page in PAGES for b in blocks(page) if b.language in ("bash", "python") and not b.title]
    skipped = [block for block in found if "not run" in block.notes]
    assert {block.notes["not run"] for block in skipped} <= set(REASONS)
    assert len(skipped) < len(found) / 2, f"{len(skipped)} of {len(found)}"


def test_what_a_block_says_to_the_test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run with: EXPORT=a/b 60=1 --seed 3 -->\n<!-- run first: mkdir a -->\n"
        "```bash\nls EXPORT MY_EXPORT EXPORT/x --n 60\n```\n\n"
        '- item\n\n  ```python title="../x.py"\n  if 1:\n      pass\n  ```\n'
    )
    monkeypatch.setattr("pages.ROOT", tmp_path)
    command, file = blocks(page)
    assert command.script == "ls a/b MY_EXPORT a/b/x --n 1 --seed 3"
    assert (command.place, command.notes["run first"]) == ("page.md:3", "mkdir a")
    assert (file.language, file.title, file.text) == ("python", "../x.py", "if 1:\n    pass\n")
    page.write_text("<!-- run with: NOWHERE=1 -->\n```bash\nls\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: there is no NOWHERE to be replaced"):
        blocks(page)[0].script  # noqa: B018


@pytest.mark.slow
def test_a_failing_command_fails_its_page(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```bash\npython pipelines/score.py --model nowhere --input . --output out\necho on\n```\n")
    with pytest.raises(AssertionError, match=r"status 2:\n== page\.md:1\n(.|\n)*nowhere"):
        checkout.run(page)


def test_the_readme_can_be_read_in_five_minutes() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 1000  # 200 words a minute
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert {path.name: path.stat().st_size for path in pictures if path.stat().st_size >= 150_000} == {}
    assert [image for image in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text) if not (ROOT / image).exists()] == []


def test_the_plain_loop_runs_and_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    loop = next(block.text for block in blocks(ROOT / "docs" / "loops.md") if block.language == "python")
    assert len([line for line in loop.splitlines() if line.strip()]) < 15
    torch.manual_seed(0)
    label = (torch.arange(60) % 6 == 0).float()
    x = torch.randn(60, 4) + label[:, None]
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    dataset = TensorDataset(x, label, torch.arange(60))
    scope: dict[str, Any] = {
        "dataset": dataset, "loader": DataLoader(dataset, 20, shuffle=True), "model": model, "epochs": 3,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.05),
        "validation_auc": lambda net: auc(label.numpy(), net(x).detach().numpy()),
    }  # fmt: skip
    exec(loop, scope)  # noqa: S102
    objective = scope["objective"]
    assert objective.epoch == 3
    assert objective.multipliers.count_nonzero() > 0
    assert capsys.readouterr().out.count("gradient_ratio") == 3


def test_the_notebook_runs_and_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """In one namespace, as a kernel does; a cell's output is text on stdout."""
    cells = json.loads((ROOT / "docs" / "five_minutes.ipynb").read_text("utf-8"))["cells"]
    scope: dict[str, Any] = {}
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        exec("".join(cell["source"]), scope)  # noqa: S102
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert capsys.readouterr().out == shown, f"code cell {number}: execute the notebook again and save it"


def test_samples_of_the_python_page_print_what_they_show() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "api.md"), module_relative=False)
    assert failed == 0, "the differences stand above"
    assert tried > 20


def test_the_python_page_has_every_name_of_the_package() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    things = [getattr(mri_alm, name) for name in mri_alm.__all__]
    public = [thing for thing in things if isinstance(thing, (type, FunctionType))]
    assert len(public) > 10
    assert [thing for thing in public if not re.search(rf"`mri_alm\.\w+\.{thing.__name__}`", page)] == []


def test_messages_of_the_questions_page_are_those_of_the_program() -> None:
    """Each piece of a quoted message between its "..." stands in a source."""
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "mri_alm").rglob("*.py"))]
    said = "\n".join(node.value for source in sources for node in ast.walk(ast.parse(source)) if _is_text(node))
    page = (ROOT / "docs" / "faq.md").read_text("utf-8")
    messages = [m for m in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE) if m != "Killed"]
    pieces = {piece for m in messages for piece in re.split(r"\.\.\.|NAME|cuda:0|\b0\b", m) if len(piece.strip()) > 2}
    assert {piece for piece in pieces if piece not in said} == set()
    assert len(messages) >= 10


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_python_on_a_page_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, block.place, "exec")


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in _LINK.findall(text):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            slugs |= set(re.findall(r'<a id="([^"]+)">', target.read_text("utf-8")))
            assert anchor in slugs, link


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_files_a_page_names_exist(page: Path) -> None:
    """Paths in backticks or links that begin with one of the repository's folders."""
    text = page.read_text("utf-8")
    named = re.findall(r"[`(]((?:configs|pipelines|benchmarks|docs|docker|cohorts|tests)/[\w./-]+?)/?[`)\s]", text)
    assert sorted({name for name in named if not ("NAME" in name or (ROOT / name).exists())}) == []
