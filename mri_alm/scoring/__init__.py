"""New exams in, decisions out: scores, explanations, DICOM structured reports."""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "new_exams": ["NewStudies", "check_request", "operating_point", "salt_of", "write_scores"],
        "shift": ["Watch"],
    },
)
