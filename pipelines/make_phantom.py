"""`python pipelines/make_phantom.py --help` says what this program does; it is mri_alm/programs/make_phantom.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("make_phantom")
