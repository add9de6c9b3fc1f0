"""The two kinds of bad input, each a sentence a person can act on."""

import difflib
import numbers
import re
from collections.abc import Iterable, Iterator, Sequence
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
    for cause in causes(error):
        text = str(cause).lower() if isinstance(cause, RuntimeError) else ""
        if isinstance(cause, MemoryError) or any(word in text for word in _NO_MEMORY):
            return StudyError(
                "memory",
                "Memory ran out while this study was prepared. Prepare fewer at once (--workers 1, or --threads 1 in "
                "training), free memory, or make its images smaller.",
            )
    return None


def itk_failed(error: BaseException) -> StudyError | None:
    """A study's error in words when it, or one of its causes, is one of ITK's for its images; else None.

    ITK's own text is left out: it may hold file names.
    """
    if memory_ran_out(error):
        return None
    for cause in causes(error):
        if isinstance(cause, RuntimeError) and (step := _ITK.search(str(cause))):
            return StudyError(
                "itk",
                f"SimpleITK refused an image of this study ({step[1]}), most likely for its size, spacing or values. "
                "Look at the images; leave the study out, or choose other series in the rules.",
            )
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what led to it, the last one first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def one_of(name: str, value: str, options: Sequence[str]) -> None:
    """Refuse a value that is none of the options.

    Raises:
        InputError: With all options.
    """
    if value not in options:
        raise InputError(f'{name} must be one of {", ".join(options)}, got "{value}".')


def numbers_only(*, none: bool = False, **values: object) -> None:
    """Refuse values that are no numbers: texts, True and False, and None unless ``none`` allows it.

    Raises:
        InputError: With the name of the first one.
    """
    for name, value in values.items():
        if none and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            shown = f'"{value}"' if isinstance(value, str) else value
            raise InputError(f"{name} must be a number, got {shown}.")


def whole_only(*, none: bool = False, least: int | None = None, **values: object) -> None:
    """Refuse values that are no whole numbers, and those below ``least``; ``none``: None is allowed.

    Raises:
        InputError: With the name of the first one.
    """
    numbers_only(none=none, **values)
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Integral):
            raise InputError(f"{name} must be a whole number, got {value}.")
        if least is not None and value < least:
            raise InputError(f"{name} must be {least} or more, got {value}.")


def refuse_all(problems: Sequence[str]) -> None:
    """Refuse with a list of problems, the first ten of them; nothing where there is none.

    Raises:
        InputError: With a line for each.
    """
    if problems:
        more = [f"... and {len(problems) - 10} more."] if len(problems) > 10 else []
        raise InputError("\n".join([*problems[:10], *more]))


def shortened(names: Sequence[object], most: int = 10) -> str:
    """The first names, and dots where there are more."""
    return ", ".join(map(str, names[:most])) + " ..." * (len(names) > most)


def did_you_mean(name: object, options: Iterable[str]) -> str:
    """``Did you mean "x"? `` (with the blank) for the nearest option; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(options), 1, 0.5)
    return f'Did you mean "{near[0]}"? ' if near else ""
