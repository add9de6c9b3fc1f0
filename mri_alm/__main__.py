"""``python -m mri_alm`` is the command ``mri-alm``."""

import sys

from mri_alm.programs.command import main

if __name__ == "__main__":
    sys.exit(main())
