"""The bar that says how long the rest will take."""

import sys
from typing import Any

from tqdm import tqdm

from mri_alm.runtime.console import own_escapes
from mri_alm.runtime.interruption import reached


def progress_bar(title: str, total: int, unit: str, *, shown: bool = True) -> Any:
    """A bar with the time left on a terminal, a line a minute in a log file; where a stopped process says it was.

    Args:
        title: What is done.
        total: How many.
        unit: Of what.
        shown: False keeps it silent, as in all but the first of several processes.
    """
    pause = 0.2 if sys.stderr.isatty() else 60
    stream = own_escapes(sys.stderr)
    bar = tqdm(total=total, desc=title, unit=unit, mininterval=pause, disable=not shown, file=stream)
    reached(lambda: f'after {bar.n} of {total} in the step "{title}"')
    return bar
