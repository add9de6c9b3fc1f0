"""Benchmarks on public images, CIFAR (the paper's experiments) and MedMNIST: archives, sets, networks, tables, search.

Nothing imports this room.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "batches": ["BatchLoader", "CosineRate", "CropFlip", "ImagePart", "StepRate"],
        "medmnist": ["FlipTurnZoom", "ShapePart", "shape_set"],
        "sets": ["binary_set", "long_tailed_set", "smallest_classes"],
        "networks": ["resnet10", "resnet32"],
        "job": ["train_and_test"],
    },
)
