"""Pictures of the docs that scripts draw."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import change_picture


def test_the_picture_of_a_change_is_the_one_that_its_script_draws() -> None:
    assert change_picture.TARGET.read_text() == change_picture.drawn()
    assert ElementTree.fromstring(change_picture.drawn()).tag.endswith("svg")
