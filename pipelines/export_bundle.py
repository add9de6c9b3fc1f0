"""`python pipelines/export_bundle.py --help` says what this program does; it is mri_alm/programs/export_bundle.py."""

from mri_alm.programs.command import start_program

if __name__ == "__main__":
    start_program("export_bundle")
