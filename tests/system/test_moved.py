"""Imports of moved modules report their new names."""

from importlib import import_module

import pytest

from nano_inference.system.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_moved_module_reports_its_new_name(old: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module(old)
    assert str(caught.value) == f"{old} has moved; import {MOVED[old]}."


def test_moved_submodule_reports_the_new_name_of_its_folder() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"serving has moved; import nano_inference\.server"
    ):
        import_module("nano_inference.serving.config")


@pytest.mark.parametrize("new", sorted({name for name in MOVED.values() if "ray" not in name}))
def test_new_names_can_be_imported(new: str) -> None:
    import_module(new)


def test_moved_name_reports_its_new_module() -> None:
    module = import_module("nano_inference.sampling.sampling_batch")
    for name in ("DrawRequest", "sampling_batch"):
        with pytest.raises(
            ImportError, match=r"import it from nano_inference\.sampling\.tensors\."
        ):
            getattr(module, name)
        assert hasattr(import_module("nano_inference.sampling.tensors"), name)
    with pytest.raises(AttributeError, match="has no attribute 'Draw'"):
        _ = module.Draw
