"""Synthetic exams with a known truth, so that everything can be tried without patients.

No number from a phantom is a clinical one.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "study": ["make_study"],
        "cohort": ["make_cohort"],
    },
)
