"""config.json written from a shape is read back as that shape."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.models import catalogue, families
from vramfit.models.architecture import from_config
from vramfit.models.config_json import config_values

SHAPES_OF_THEIR_OWN = {
    "stabilityai/stablelm-2-12b": {"norm"},  # its norms have no bias, which its config does not say
    "shape/gpt2-124m-untied": {"qkv_bias"},  # no GPT-2 of the library's
}


@pytest.mark.parametrize(
    "name",
    [name for name in catalogue.known() if catalogue.find(name).family in families.FAMILIES],  # type: ignore[union-attr]
)
def test_writing_and_reading_gives_the_same_architecture(name: str) -> None:
    architecture = catalogue.find(name)
    assert architecture is not None

    again = from_config(config_values(architecture), name)

    given = dataclasses.replace(architecture, published_params=None)
    names = {field.name for field in dataclasses.fields(given) if field.compare} - {"residual_dropout"} | {"drops_out"}
    different = {name for name in names if getattr(given, name) != getattr(again, name)}
    assert different == SHAPES_OF_THEIR_OWN.get(name, set())


def test_fewer_blocks_can_be_asked_for() -> None:
    architecture = catalogue.find("meta-llama/Llama-3.1-405B")
    assert architecture is not None

    assert from_config(config_values(architecture, layers=2), "two").layers == 2
