"""The cache of prepared exams: MONAI's, with entries that are whole or absent and a digest that is checked."""

import logging
from copy import deepcopy
from typing import Any

from monai.data import PersistentDataset
from monai.utils import convert_to_tensor

from mri_alm.files import DamagedFileError, load_tensors, save_tensors

logger = logging.getLogger("mri_alm")


class CheckedCache(PersistentDataset):
    """MONAI's ``PersistentDataset`` for dictionaries; a damaged entry is made again, and that is said.

    MONAI moves an entry into its place by a copy, so that a kill can leave half of it, and reads flipped bits as if
    they were an exam. Arguments are those of ``PersistentDataset``; ``cache_dir`` must be given.

    Raises:
        InputError: From an access, if the folder is full, cannot be written, or holds something else.
    """

    def _cachecheck(self, item_transformed: dict[str, Any]) -> dict[str, Any]:
        path = self.cache_dir / f"{self.hash_func(item_transformed).decode()}{self.transform_hash}.pt"
        if path.exists():
            try:
                return load_tensors(path)
            except DamagedFileError as error:
                logger.warning("Cache: %s The exam is prepared again.", error)
        prepared: dict[str, Any] = self._pre_transform(deepcopy(item_transformed))
        save_tensors(path, convert_to_tensor(prepared, convert_numeric=False, track_meta=self.track_meta))
        return prepared
