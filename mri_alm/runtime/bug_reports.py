"""What ended one study and nobody foresaw, in words that name nobody: for its row, and for a bug report."""

import platform
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import mri_alm
from mri_alm.errors import InputError, StudyError, causes, find_cause, itk_failed, memory_ran_out

BUG_REPORT = "bug_report.txt"  # its name, or the end of its name
_PACKAGES = ("mri-alm", "numpy", "SimpleITK", "nibabel", "pydicom", "monai", "torch")
_FRAMES = 40  # the most that are shown; those in the middle of an endless recursion say nothing
_PACKAGE = Path(mri_alm.__file__).parent


class UnexpectedError(StudyError):
    """An exception that nobody foresaw ended one study; the others go on.

    Args:
        kind: Name of the exception's class.
        report: For its file, see :func:`unexpected`.
    """

    def __init__(self, kind: str, report: str) -> None:
        super().__init__(
            "unexpected",
            f"An error that nobody foresaw ({kind}) ended this study, most likely a fault of mri-alm; the others went "
            f"on. Please report it with the study's {BUG_REPORT}, which names no patient.",
        )
        self.kind, self.report = kind, report

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickle with both arguments, so that the error survives a worker process."""
        return UnexpectedError, (self.kind, self.report)


def ends_the_run(error: Exception) -> bool:
    """Whether an error, or its cause, is the user's and no study's, such as a full disk: no other study would go on."""
    cause = find_cause(error, InputError)
    return cause is not None and not isinstance(cause, StudyError)


def study_failure(error: Exception) -> StudyError:
    """One study's failure in words, whatever it, or one of its causes, was."""
    if known := find_cause(error, StudyError) or memory_ran_out(error) or itk_failed(error):
        return known
    if ends_the_run(error):  # but met while one study was read; its words may name a folder, and a folder a patient
        return StudyError(
            "unreadable",
            "A folder or file that belongs to this study cannot be used: it is empty, damaged, or may not be read. "
            "Look at its files and their rights.",
        )
    return unexpected(error)


def unexpected(error: BaseException) -> UnexpectedError:
    """An exception as one study's failure, with a report: kinds, places in the code, versions.

    What the exception says is left out, as are values and paths: each may hold a name.
    """
    chain = list(causes(error))[::-1]
    lines = ["Bug report of mri-alm. It names no patient, no folder and no value of the exam.", ""]
    for one in chain:
        lines += [f"{type(one).__module__}.{type(one).__qualname__}", *_places(one.__traceback__), ""]
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    lines += [", ".join([f"Python {platform.python_version()} on {platform.system()}", *versions]), ""]
    return UnexpectedError(type(chain[0]).__name__, "\n".join(lines))


def _places(trace: TracebackType | None) -> list[str]:
    """Where an exception came through, outermost first: files of this package, modules of others."""
    lines = []
    for frame, number in traceback.walk_tb(trace):
        file = Path(frame.f_code.co_filename)
        ours = file.is_relative_to(_PACKAGE)
        place = file.relative_to(_PACKAGE.parent).as_posix() if ours else frame.f_globals.get("__name__", "?")
        lines.append(f"  {place}, line {number}, in {frame.f_code.co_name}")
    return lines if len(lines) <= _FRAMES else [*lines[: _FRAMES // 2], "  ...", *lines[-_FRAMES // 2 :]]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
