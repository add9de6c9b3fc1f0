"""`python pipelines/score.py --help` says what this program does; it is mri_alm/programs/score.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("score")
