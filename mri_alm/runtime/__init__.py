"""What a program needs of the machine: whole files, locks, tables, parallel tasks, progress, pseudonyms.

Nothing here knows of MRI or of learning, and nothing imports torch or MONAI.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "tasks": ["Pool", "run_tasks"],
    },
)
