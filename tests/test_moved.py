"""The modules of version 0.1.0: every one is found, its names are those of now, and a warning says where."""

import importlib

import pytest

import mri_alm
from mri_alm.moved import MODULES, RENAMED


@pytest.mark.parametrize("old", sorted(MODULES))
def test_an_old_module_leads_to_modules_that_exist(old: str) -> None:
    assert importlib.import_module(f"mri_alm.{old}").__name__ == f"mri_alm.{old}"
    for room in MODULES[old].split():
        importlib.import_module(f"mri_alm.{room}")


def test_an_old_name_gives_the_thing_of_now_and_says_where_it_is() -> None:
    from mri_alm.metrics.threshold import fixed_fn_threshold

    said = r"mri_alm.threshold.fixed_fn_threshold is now mri_alm.metrics.threshold.fixed_fn_threshold"
    with pytest.warns(DeprecationWarning, match=said):
        from mri_alm.threshold import fixed_fn_threshold as old
    assert old is fixed_fn_threshold


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_name_that_changed_too_is_found(old: str) -> None:
    module, name = old.split(".")
    with pytest.warns(DeprecationWarning, match=rf"{name} is now mri_alm\..*\.{RENAMED[old]};"):
        getattr(importlib.import_module(f"mri_alm.{module}"), name)


def test_a_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'mri_alm\.threshold' has no attribute 'nothing'"):
        getattr(importlib.import_module("mri_alm.threshold"), "nothing")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match=r"mri_alm\.never"):
        importlib.import_module("mri_alm.never")


def test_the_face_lists_about_a_dozen_names_and_the_rooms() -> None:
    names = dir(mri_alm)
    assert names == sorted(mri_alm.__all__)
    assert not set(names) & set(MODULES)
    assert all(getattr(mri_alm, name).__doc__ for name in names)
    assert 10 <= sum(not hasattr(getattr(mri_alm, name), "__path__") for name in names) <= 15
