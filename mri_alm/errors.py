"""The two kinds of bad input, each a sentence a person can act on."""

import re
from collections.abc import Sequence
from typing import TypeVar

# How ITK and PyTorch say it, which have no error of their own for it.
_NO_MEMORY = ("failed to allocate memory", "bad_alloc", "can't allocate memory", "not enough memory", "out of memory")

_ITK = re.compile(r"Exception thrown in SimpleITK (\w+)")


class InputError(ValueError):
    """Something the user gave cannot be used: the message says what, where, which value, and what to do next.

    Programs print the message without a traceback and exit with status 2.
    """


class StudyError(InputError):
    """One study cannot be used; the others go on.

    Args:
        code: Short stable name of the kind of error, such as ``"no_t2"`` or ``"slice_gap"``.
        message: What is wrong and what to do, without any patient identity.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Pickle with both arguments, so that the error survives a worker process."""
        return StudyError, (self.code, self.message)


Kind = TypeVar("Kind", bound=InputError)


def find_cause(error: BaseException, kind: type[Kind]) -> Kind | None:
    """The first error of a kind among an error and its causes: MONAI wraps what a transform or a config item raises."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__
    return cause


def memory_ran_out(error: BaseException) -> StudyError | None:
    """A study's error in words when it, or one of its causes, is that no memory could be had; else None."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower() if isinstance(cause, RuntimeError) else ""
        if isinstance(cause, MemoryError) or any(word in text for word in _NO_MEMORY):
            return StudyError(
                "memory",
                "Memory ran out while this study was prepared. Prepare fewer at once (--workers 1, or --threads 1 in "
                "training), free memory, or make its images smaller.",
            )
        cause = cause.__cause__ or cause.__context__
    return None


def itk_failed(error: BaseException) -> StudyError | None:
    """A study's error in words when it, or one of its causes, is one of ITK's for its images; else None.

    ITK's own text is left out: it may hold file names.
    """
    if memory_ran_out(error):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and (step := _ITK.search(str(cause))):
            return StudyError(
                "itk",
                f"SimpleITK refused an image of this study ({step[1]}), most likely for its size, spacing or values. "
                "Look at the images; leave the study out, or choose other series in the rules.",
            )
        cause = cause.__cause__ or cause.__context__
    return None


def one_of(name: str, value: str, options: Sequence[str]) -> None:
    """Refuse a value that is none of the options.

    Raises:
        InputError: With all options.
    """
    if value not in options:
        raise InputError(f'{name} must be one of {", ".join(options)}, got "{value}".')
