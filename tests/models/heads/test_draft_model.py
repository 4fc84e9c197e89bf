"""Which models may draft for others."""

import pytest

from jaxvllm.models.families import model_spec
from jaxvllm.models.heads.draft_model import DraftModel
from tests.models.fixture import Fixture


@pytest.mark.parametrize(
    ("name", "rule"),
    [("gemma2", "see all positions"), ("gemma4", "see all positions"), ("qwen3_5", "keep keys and values of one size")],
)
def test_a_model_whose_layers_keep_other_things_drafts_for_nobody(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        DraftModel(model_spec(Fixture.load(name).config))
    DraftModel(model_spec(Fixture.load("llama").config))
