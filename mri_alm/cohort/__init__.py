"""An export and its labels -> a checked manifest and its splits.

Layouts of other people's folders, label tables, the preparation of every study, the overview for a person. Neither
torch nor MONAI; no name of a patient leaves this room.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "manifest": ["Cohort", "partition_splits", "read_manifest", "stratified_splits"],
        "prepare_cohort": ["prepare_cohort"],
        "overview": ["check_cohort"],
    },
)
