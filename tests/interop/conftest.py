"""Code that comes with models is copied to a folder of the tests', not to the user's cache."""

from collections.abc import Iterator

import pytest
from transformers import dynamic_module_utils


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """See above."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(str(folder))
        yield
