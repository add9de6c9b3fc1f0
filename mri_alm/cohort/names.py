"""Names of studies and patients as they are compared, and what a spreadsheet makes of them.

Nothing is matched loosely: 12 is not 0012. What a spreadsheet may have changed is said, or refused where it could mean
two exams.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from decimal import ROUND_DOWN, Context, Decimal

_SPREADSHEET = Context(prec=15, rounding=ROUND_DOWN)  # digits that Excel keeps of a number; the rest become zeros
_NUMBER = re.compile(r"\d{1,40}([.,]\d{1,20})?(e[+-]?\d{1,2})?")
_MONTH = "jan|feb|mar|mär|apr|ma[iy]|ju[nl]|aug|sep|o[ck]t|nov|de[cz]"
# What cannot be an exam's name any more, and what a spreadsheet made it of; searched in tidied names.
_DAMAGED = {
    r"\d([.,]\d+)?e\+?\d{1,2}": "are in scientific notation, to which a spreadsheet shortens long numbers",
    rf"\d{{1,4}}([-./ ]\d{{1,2}}){{2}}|\d{{1,2}}[-. ]+({_MONTH})\w*|({_MONTH})\w*[-. ]+\d{{1,4}}": (
        "look like dates, which a spreadsheet makes of numbers such as 1-2"
    ),
    r"#+|#\w+[!?/]*\w*[!?]?": "are a spreadsheet's signs for an error or a column that is too narrow",
}


def tidy(name: str) -> str:
    """A name as names are compared.

    Without outer blanks and slashes, slashes forward, lower case; Unicode in one form, with one kind of blank and of
    hyphen and without characters that nobody sees.
    """
    text = unicodedata.normalize("NFKC", name).replace("\\", "/")
    text = "".join(_plain(letter) for letter in text)
    parts = (" ".join(part.split()) for part in text.split("/"))
    return unicodedata.normalize("NFKC", "/".join(part for part in parts if part not in ("", ".")).casefold())


def one_spelling(names: Iterable[str]) -> list[str]:
    """Each name as it was spelt where it, or another spelling of it (`tidy`), came first."""
    first: dict[str, str] = {}
    return [first.setdefault(tidy(name), name) for name in names]


def _plain(letter: str) -> str:
    """One letter: every dash is a hyphen, control and format characters are nothing unless they are blanks."""
    kind = unicodedata.category(letter)
    return "-" if kind == "Pd" else "" if kind in ("Cc", "Cf") and not letter.isspace() else letter


def number_of(name: str) -> Decimal | None:
    """The number that a spreadsheet makes of a tidied name; None: it stays a text."""
    text = name.removeprefix("'")
    return _SPREADSHEET.create_decimal(text.replace(",", ".")).normalize() if _NUMBER.fullmatch(text) else None


def loosely(name: str) -> str:
    """A tidied name as a spreadsheet may leave it, to tell whether two names could be of one patient."""
    number = number_of(name)
    return name if number is None else str(number)


def written_by_spreadsheet(name: str) -> bool:
    """Whether a spreadsheet that takes names for numbers could have written this one."""
    number = number_of(name)
    if number is None:
        return False
    plain = name.replace(",", ".")
    return format(number, "f") == plain.removesuffix(".0") or "e" in plain


def kept_as_text(names: Collection[str]) -> bool:
    """Whether a column cannot have gone through a spreadsheet as numbers: one of its numbers would look otherwise."""
    return any(number_of(name) is not None and not written_by_spreadsheet(name) for name in names)


def by_number(names: Iterable[str]) -> dict[Decimal, list[str]]:
    """Tidied names that a spreadsheet takes for numbers, by the number."""
    found: dict[Decimal, list[str]] = defaultdict(list)
    for name in names:
        if (number := number_of(name)) is not None:
            found[number].append(name)
    return found


def likely_cause(name: str, known: Mapping[Decimal, Collection[str]]) -> str:
    """Why a tidied name may fit none of the known ones, as words that follow "their names"; empty: nobody knows.

    Args:
        name: That fits none.
        known: See :func:`by_number`.
    """
    number = number_of(name)
    like = known.get(number, ()) if number is not None else ()
    if any(one.lstrip("0") == name.lstrip("0") for one in like):
        return "differ from an exam's by leading zeros only"
    if like:
        return "differ from an exam's only as a spreadsheet writes numbers"
    return next((cause for pattern, cause in _DAMAGED.items() if re.fullmatch(pattern, name)), "")
