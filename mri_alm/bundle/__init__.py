"""MONAI's side of a run: settings, transforms and cache, checkpoints, the run folder, its inspection and its export.

Modules that reports read (``settings``, ``run_folder``) import neither torch nor MONAI.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "config": ["check", "choose", "join"],
        "settings": ["profile"],
        "transforms": [
            "CheckedCache",
            "LoadRegisteredExamd",
            "NormalizeWithinMaskd",
            "collate",
            "join_sequences",
            "split_sequences",
            "within_masks",
            "without_hbv",
        ],
        "trained_run": ["Ensemble", "TrainedRun", "averaged", "of_largest"],
    },
)
