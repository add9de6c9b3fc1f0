"""Damaged files and exams: right, refused or named, nothing else. The long run is benchmarks/fuzz_ingest.py."""

import tracemalloc

import numpy as np
import pytest
from fuzz import FORMATS, make, read, write_sources
from fuzz_structure import EVERY, NOTHING, structure_outcome


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("form", FORMATS)
def test_undamaged_sources_are_read(sources, form):
    assert read(form, sources[form]) == "read"


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_are_read_or_refused(sources, form, tmp_path):
    outcomes = set()
    for number in range(25):
        folder = tmp_path / str(number)
        make(sources[form], folder, np.random.default_rng([7, number]))
        outcomes.add(read(form, folder))
    assert outcomes != {"read"}, "no damage was noticed"


def test_an_absurd_length_is_not_allocated(sources, tmp_path):
    """Explicit little endian: the eight bytes before the pixels are VR OW, two reserved bytes, and their length."""
    folder = tmp_path / "case"
    folder.mkdir()
    for file in sources["dicom"].iterdir():
        data = file.read_bytes()
        at = data.index(b"\xe0\x7f\x10\x00OW\x00\x00") + 8
        (folder / file.name).write_bytes(data[:at] + b"\xf0\xff\xff\x7f" + data[at + 4 :])
    tracemalloc.start()
    outcome = read("dicom", folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome == "read"  # the pixels are all there
    assert peak < 50e6


def test_an_error_of_our_own_is_not_taken_for_damage(sources, monkeypatch):
    """What no damaged file can raise costs its file alone, and says that it is ours."""

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("mri_alm.imaging.series.b_value", broken)
    with pytest.raises(AssertionError, match=r"nobody foresaw \(ZeroDivisionError\)"):
        read("dicom", sources["dicom"])


SOUND = [number for number, one in enumerate([*EVERY.values()] * 3) if one is NOTHING]
DAMAGED = [number for number, one in enumerate(EVERY.values()) if one is not NOTHING]


@pytest.mark.parametrize("number", SOUND)
def test_a_sound_exam_is_read_right(number, tmp_path):
    assert structure_outcome(number, 3, tmp_path / "exam").kind in ("right", "right, warned")


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] if n % 3 else []) for n in DAMAGED])
def test_a_damaged_exam_is_right_refused_or_named(number, tmp_path):
    """All damages in the long run of the tests, a third of them in the short one."""
    found = structure_outcome(number, 4, tmp_path / "exam")
    assert found.kind in ("right", "right, warned", "refused", "named"), found
