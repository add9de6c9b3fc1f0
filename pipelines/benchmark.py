"""`python pipelines/benchmark.py --help` says what this program does; it is mri_alm/programs/benchmark.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("benchmark")
