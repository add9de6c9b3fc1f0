"""The paper's experiments on CIFAR: archives, sets, networks, tables, the search.

Nothing imports this room.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "batches": ["BatchLoader", "CropFlip", "ImagePart", "StepRate"],
        "sets": ["binary_set", "long_tailed_set", "smallest_classes"],
        "networks": ["resnet10", "resnet32"],
        "job": ["train_and_test"],
    },
)
