"""An exam in any format -> T2, ADC and high b on one grid, or a typed refusal.

DICOM headers and files, series and their roles, volumes, b-values, ADC, registration, pictures. Neither torch nor
MONAI.
"""

from mri_alm.runtime.faces import faces

__getattr__, __dir__, __all__ = faces(
    __name__,
    {
        "exam": ["load_images", "read_series", "read_study"],
        "dicom_files": ["find_studies"],
        "image_file": ["read_image"],
        "registration": ["onto_grid", "register_rigid"],
    },
)
