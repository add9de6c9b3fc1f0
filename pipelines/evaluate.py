"""`python pipelines/evaluate.py --help` says what this program does; it is mri_alm/programs/evaluate.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("evaluate")
