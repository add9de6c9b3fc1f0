"""The two kinds of bad input, each a sentence a person can act on."""


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
