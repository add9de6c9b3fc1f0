"""Scores and labels -> figures with intervals, comparisons, tables, the report (its templates lie beside it).

Neither torch nor MONAI.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "analysis": ["Evaluation", "evaluate"],
        "report": ["write_evaluation"],
    },
)
