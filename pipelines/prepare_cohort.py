"""`python pipelines/prepare_cohort.py --help` says what this program does; it is mri_alm/programs/prepare_cohort.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("prepare_cohort")
