"""The real archives, where their mosaics are at hand: what cannot be checked on made-up images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mri_alm.cifar.archive import read_archive
from mri_alm.cifar.batches import STATISTICS
from mri_alm.cifar.sets import binary_set, long_tailed_set

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tool = SHARED / "tools" / "unpack_cifar.py"
    if not tool.is_file() or not (SHARED / "data" / "cifar").is_dir():
        pytest.skip("the CIFAR mosaics are not here")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, str(tool), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.slow
def test_the_real_archives_and_the_sets_of_the_paper(data: Path) -> None:
    archive = read_archive(data, "cifar10")
    assert np.bincount(archive.train.fine).tolist() == [5000] * 10
    share = np.stack([np.bincount(archive.train.image[:, c].ravel(), minlength=256) for c in range(3)]) / (
        50_000 * 1024
    )
    level = np.arange(256) / 255
    mean = share @ level
    moments = [mean, np.sqrt(share @ level**2 - mean**2)]
    np.testing.assert_allclose(moments, STATISTICS["cifar10"], rtol=0, atol=6e-5)
    ten = {"majority": "truck", "critical": "automobile", "ratio": 100, "validation": 100, "splits": 1}
    assert binary_set(data, "cifar10", **ten).counts(0) == (4900, 49)
    hundred = {"majority": "aquatic_mammals", "critical": "shark", "ratio": 100, "validation": 50, "splits": 1}
    assert binary_set(data, "cifar100", **hundred).counts(0) == (2250, 22)  # the paper: all 2250
    assert binary_set(data, "cifar100", **hundred, rule="overlapping").counts(0) == (2025, 20)  # the authors' code
    tail = long_tailed_set(data, "cifar10", ratio=100, validation=100, splits=1)
    assert tail.counts(0) == tuple(int(4900 * 100 ** (-k / 9)) for k in range(10))
