"""What the documentation shows runs as written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mri_alm.metrics import auc

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def test_the_readme_s_loop_runs_and_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = blocks(ROOT / "README.md", "python")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_a_page_names_exist(page: Path) -> None:
    """Paths in backticks or links that begin with one of the repository's folders."""
    text = page.read_text("utf-8")
    named = re.findall(r"[`(]((?:configs|pipelines|benchmarks|docs|docker|cohorts|tests)/[\w./-]+?)/?[`)\s]", text)
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert missing == []


def test_every_setting_is_explained() -> None:
    config = list(json.loads((ROOT / "configs" / "prostate_alm.json").read_text("utf-8")))
    explained = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "settings.md").read_text("utf-8")))
    assert [name for name in config[: config.index("imports")] if name not in explained] == []
