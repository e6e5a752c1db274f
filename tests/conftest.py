"""One thread, fixed seeds, repeatable property tests."""

import pytest
import torch
from hypothesis import Phase, settings

torch.set_num_threads(1)

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile(
    "mutants",  # a failure is enough; its smallest example is not looked for
    settings.get_profile("repeatable"),
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
