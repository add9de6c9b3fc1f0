"""Memory that runs out while a study is prepared: as an error, and as the system's SIGKILL."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from exams import dicom_exam, prepare

import mri_alm.cohort.prepare_cohort
from mri_alm.cohort.prepare_study import Preparation, StudyTask
from mri_alm.errors import StudyError, memory_ran_out

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    for number in range(3):
        dicom_exam(root / f"p{number}", number)
    return root


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (MemoryError(), True),
        (RuntimeError("itk::ERROR: Failed to allocate memory for image."), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("another"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_want_of_memory_is_known_by_its_words_also_as_a_cause(error: Exception, known: bool) -> None:
    wrapped = RuntimeError("applying transform")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        found = memory_ran_out(one)
        assert isinstance(found, StudyError) == known
        assert not known or (found is not None and found.code == "memory" and "--workers 1" in found.message)


TOO_LARGE = """
import resource, sys
from pathlib import Path
import SimpleITK as sitk
from mri_alm.imaging.image_file import read_image
import mri_alm.cohort.prepare_cohort
from mri_alm.errors import StudyError
image = sitk.Image(400, 400, 300, sitk.sitkUInt8) + 1
image[5, 5, 5] = 7
path = Path(sys.argv[1])
sitk.WriteImage(image, str(path))
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, -1))
try:
    read_image(path, "t2")
except StudyError as error:
    sys.stdout.write(error.code)
"""


def test_an_image_that_does_not_fit_the_memory_is_not_called_unreadable(tmp_path: Path) -> None:
    """192 MB as float32, and 60 MB more than the process already has."""
    words = [sys.executable, "-c", TOO_LARGE, str(tmp_path / "t2.nii")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "memory"), done.stderr


LIMITED = """
import resource, sys
from pathlib import Path
import SimpleITK as sitk
from exams import image_exam, prepare
root, output = Path(sys.argv[1]), Path(sys.argv[2])
for number in range(3):
    name = f"1000{number}_100000{number}"
    image_exam(root / name, number, {role: f"{name}_{role}.mha".replace("t2", "t2w") for role in ("t2", "adc", "hbv")})
prepare(root, output.with_name("warm"))  # what is imported, and the threads, are no matter of this test
path = root / "10001_1000001" / "10001_1000001_t2w.mha"
small = sitk.ReadImage(str(path))
times = int((2**26 / small.GetNumberOfPixels()) ** (1 / 3))  # as many voxels as an exam may have
size = [times * n for n in small.GetSize()]
large = sitk.Resample(
    small, size, sitk.Transform(), sitk.sitkNearestNeighbor, small.GetOrigin(),
    [s / times for s in small.GetSpacing()], small.GetDirection(), 0, sitk.sitkUInt8,
)
sitk.WriteImage(large, str(path), True)
voxels = large.GetNumberOfPixels()
del large
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * voxels, -1))
rows = prepare(root, output).rows
sys.stdout.write(f"{voxels} {sorted(row['error_code'] for row in rows)}")
"""


@pytest.mark.slow
def test_the_study_that_is_larger_than_the_memory_fails_alone(tmp_path: Path) -> None:
    """As float32 its T2 alone takes four bytes a voxel, and three are left."""
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "in"), str(tmp_path / "c")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    voxels, _, codes = done.stdout.partition(" ")
    assert (int(voxels) > 5 * 10**7, codes) == (True, "['', '', 'memory']"), done.stderr
    assert [path.name for path in (tmp_path / "c").glob("*/t2.nii.gz")] == ["t2.nii.gz"] * 2


def test_the_study_that_memory_was_too_small_for_fails_alone(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Preparation._write

    def scarce(self: Preparation, images: Any, part: Path) -> dict[str, str]:
        found = original(self, images, part)
        if part.name == first:
            raise MemoryError
        return found

    first = prepare(export, tmp_path / "c").rows[0]["study"]
    (tmp_path / "c" / first / "study.json").unlink()
    monkeypatch.setattr(Preparation, "_write", scarce)
    outcome = prepare(export, tmp_path / "c", resume=True)
    assert [row["error_code"] for row in outcome.rows] == ["memory", "", ""]
    assert [path.name for path in (tmp_path / "c" / first).iterdir()] == ["study.json"]
    assert outcome.kept == 2
    monkeypatch.undo()
    assert prepare(export, tmp_path / "c", resume=True).failed == 0


def processes_below(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.slow
def test_what_an_earlier_kill_took_along_is_prepared_alone_and_may_be_killed_again(
    export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of the first study is killed; the other studies, and a second attempt, are not harmed."""
    studies = [row["study"] for row in prepare(export, tmp_path / "c").rows]
    for study in studies[:2]:  # as a kill in the middle of both leaves them
        part = tmp_path / "c" / f".part-{study[:4]}"
        part.mkdir()
        (tmp_path / "c" / study).rename(part / study)
        (part / study / "study.json").unlink()
    killed: list[int] = []

    def system() -> None:
        """Kill the worker as soon as it has begun the first study."""
        end = time.monotonic() + 120
        while not killed and time.monotonic() < end:
            time.sleep(0.001)
            if list((tmp_path / "c").glob(f".part-*/{studies[0]}")):
                for pid in processes_below(os.getpid()):
                    if b"LokyProcess" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

    thread = threading.Thread(target=system)
    original = mri_alm.cohort.prepare_cohort.sweep

    def swept(folder: Path) -> None:
        """The traces are gone: what the thread sees from now on is the worker's."""
        original(folder)
        if thread.ident is None:
            thread.start()

    monkeypatch.setattr(mri_alm.cohort.prepare_cohort, "sweep", swept)
    outcome = prepare(export, tmp_path / "c", resume=True)
    thread.join()
    assert killed
    assert "2 studies were in work when an earlier run was killed" in caplog.text
    assert outcome.kept == 1
    assert [row["error_code"] for row in outcome.rows] == ["killed", "", ""]
    assert "most likely for want of memory" in outcome.rows[0]["error_text"]
    assert not list((tmp_path / "c").glob(".part-*"))
    assert prepare(export, tmp_path / "c", resume=True).failed == 0


class Deadly(Preparation):
    """Kills the process that prepares the study named in a file beside the cohort."""

    def prepare(self, job: StudyTask, refused: StudyError | None = None) -> dict[str, Any]:
        if refused is None and job.key == (self.folder.parent / "victim").read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(job, refused)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_study_alone_and_says_no_name(
    export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(export, tmp_path / "c").rows
    for row in whole[:2]:
        shutil.rmtree(tmp_path / "c" / row["study"])
    (tmp_path / "victim").write_text(whole[0]["study"])
    monkeypatch.setattr("mri_alm.cohort.prepare_cohort.Preparation", Deadly)
    outcome = prepare(export, tmp_path / "c", resume=True, backend="loky")
    assert [row["error_code"] for row in outcome.rows] == ["killed", "", ""]
    assert "A worker died (killed, or out of memory)." in caplog.text
    assert str(export) not in caplog.text
    assert not list((tmp_path / "c").glob(".part-*"))
    monkeypatch.undo()
    assert prepare(export, tmp_path / "c", resume=True, backend="loky").rows == whole
