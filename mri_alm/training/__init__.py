"""The main job: engine, one split, the run with its threshold and report, tracking."""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "engine": ["EpochEnd", "EpochSeed", "IndexedTrainer", "CheckpointRule"],
        "rates": ["scheduled_rate"],
        "initial_weights": ["start_from"],
        "run": ["phantom_cohort", "train_and_evaluate"],
    },
)
