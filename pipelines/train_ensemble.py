"""`python pipelines/train_ensemble.py --help` says what this program does; it is mri_alm/programs/train_ensemble.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("train_ensemble")
