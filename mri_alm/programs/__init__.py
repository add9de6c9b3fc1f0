"""The programs: command lines, what they print, and their exit status. Nothing else may parse arguments or print.

A module a program; ``parser()`` makes its command line, ``main(arguments)`` runs it and gives the exit status.
What takes long to import (torch, MONAI) is imported in ``main``, after the arguments were read, so that ``--help`` and
a mistake are answered at once. ``command`` starts them, also for ``python pipelines/NAME.py``.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(__name__, {"command": ["start_program"]})
