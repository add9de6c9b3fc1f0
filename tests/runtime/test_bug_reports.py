"""What a bug report says, and that it says nothing about anybody."""

import copy
import json
import re

import pytest

from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.exam import crop_centre
from mri_alm.runtime.bug_reports import UnexpectedError, ends_the_run, study_failure, unexpected


def caught(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as found:
        return found


def test_a_report_says_where_in_our_files_and_never_what_an_exception_said() -> None:
    with pytest.raises(AttributeError) as error:
        crop_centre({"crop_center_mm": {"Mueller": 1}})  # no text, as nothing that reads a table gives it
    failure = unexpected(caught(RuntimeError("of Hans Mueller"), error.value))
    assert re.search(
        r"^builtins\.AttributeError\n  test_bug_reports, line \d+, in test_a_report\w+\n"
        r"  mri_alm/imaging/exam\.py, line \d+, in crop_centre\n\nbuiltins\.RuntimeError\n  test_bug_reports, line",
        failure.report,
        re.MULTILINE,
    )
    assert "Mueller" not in failure.report + failure.message
    assert re.search(r"Python 3\.\d+\.\d+ on \w+, mri-alm \d.*, numpy \d.*, pydicom \d", failure.report)
    assert "/" not in re.sub(r"mri_alm/imaging/exam\.py", "", failure.report)  # no folder of this machine
    assert (failure.code, failure.kind) == ("unexpected", "AttributeError")  # the first cause, not its wrapper
    assert "(AttributeError)" in failure.message
    again = copy.copy(failure)  # as it travels from a worker
    assert (type(again), again.report, again.message) == (UnexpectedError, failure.report, failure.message)


def test_an_endless_recursion_fits_on_a_page() -> None:
    def endless(depth: int) -> int:
        return endless(depth + 1)

    with pytest.raises(RecursionError) as error:
        endless(0)
    assert len(unexpected(error.value).report.splitlines()) < 60


NO_T2 = StudyError("no_t2", "none")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NO_T2, "no_t2"),
        (caught(RuntimeError("applying transform"), NO_T2), "no_t2"),
        (MemoryError(), "memory"),
        (RuntimeError("Exception thrown in SimpleITK ImageFileReader_Execute: /data/Mueller"), "itk"),
        (InputError("/data/Mueller: the folder is empty"), "unreadable"),
        (json.JSONDecodeError("Mueller", "Mueller", 0), "unexpected"),
        (IndexError("Mueller"), "unexpected"),
    ],
)
def test_whatever_ends_a_study_is_its_failure_in_words_without_names(error: Exception, code: str) -> None:
    failure = study_failure(error)
    assert failure.code == code
    assert "Mueller" not in failure.message
    assert ends_the_run(error) == (code == "unreadable")
